"""Endpoint: programs that talk to a policy as to a server of the OpenAI or Anthropic API."""
