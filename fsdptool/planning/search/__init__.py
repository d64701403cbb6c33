"""Which configurations are tried, and which one of those that fit is chosen."""
