"""SimpleTuner's config.json."""
