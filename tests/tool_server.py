"""An MCP server on standard input and output with one tool: python tests/tool_server.py."""

from mcp.server import MCPServer

server = MCPServer("numbers")


@server.tool()
def count(text: str) -> int:
    """The number of characters."""
    return len(text)


if __name__ == "__main__":
    server.run()
