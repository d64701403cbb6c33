"""The pages: each module has a list ``routes``, and ``page`` if it has a place in the menu."""
