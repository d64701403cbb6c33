"""The local web interface: pages that parse a request, call one function and show its answer.

It is served by ``fsdptool ui`` from this machine to this machine. The server never imports torch: work that
needs it runs in one child process (``jobs``).
"""
