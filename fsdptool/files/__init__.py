"""Files as text and as trees with places, checked against schemas, and replaced whole or not at all."""
