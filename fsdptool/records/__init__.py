"""The frozen records that pass between rooms, and the JSON Schemas made from them. Standard library only."""
