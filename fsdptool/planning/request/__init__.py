"""What is asked for: options, training files of other programs and recipes as the inputs of a plan."""
