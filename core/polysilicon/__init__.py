"""One LLM server for every vendor's silicon."""
