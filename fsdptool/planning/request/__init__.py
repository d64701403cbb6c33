"""Options, training files of other programs and recipes, read into the inputs of a plan."""
