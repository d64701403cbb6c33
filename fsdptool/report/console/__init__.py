"""What commands print to a terminal, a pipe or a log."""
