"""From a reference, as a person types it, to a :class:`~fsdptool.records.anatomy.ModelSpec`. Torch-free."""

from fsdptool.source.config_checks import check_consent, consented
from fsdptool.source.resolve import locate, resolve, resolve_choice

__all__ = ["check_consent", "consented", "locate", "resolve", "resolve_choice"]
