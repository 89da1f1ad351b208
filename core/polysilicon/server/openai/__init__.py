"""OpenAI's HTTP interface, with vLLM's additions."""
