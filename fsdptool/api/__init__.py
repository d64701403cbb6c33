"""What the library offers as functions, each composed of several packages."""
