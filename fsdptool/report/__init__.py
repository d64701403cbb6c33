"""Reports: records as text on the console, as pages, and for code scanning."""
