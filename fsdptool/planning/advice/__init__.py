"""What a plan says beside its verdict: findings, reasons, and what to change."""
