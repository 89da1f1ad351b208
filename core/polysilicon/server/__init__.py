"""The HTTP server: OpenAI's and Anthropic's interfaces over a dispatcher of engine requests."""
