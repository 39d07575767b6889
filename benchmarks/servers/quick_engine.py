"""A stand-in of llama-server for `benchmarks.cycles`: it starts at once and responds with one token."""

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

ANSWER = b'{"choices": [{"message": {"content": "a"}}], "usage": {"completion_tokens": 1}}'


class Handler(BaseHTTPRequestHandler):
    """The handler of all requests, with the same response to each."""

    def do_POST(self) -> None:
        """Send one token."""
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Length", str(len(ANSWER)))
        self.end_headers()
        self.wfile.write(ANSWER)

    do_GET = do_POST  # noqa: N815 - the base class's name


if __name__ == "__main__":
    sys.stderr.write("quick engine\n")
    HTTPServer(("127.0.0.1", 0), Handler).serve_forever()
