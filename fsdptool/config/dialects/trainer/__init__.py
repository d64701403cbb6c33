"""transformers' TrainingArguments."""
