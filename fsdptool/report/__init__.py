"""Reports: documents as console tables, HTML pages, SARIF and GitHub annotations."""
