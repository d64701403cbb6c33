"""The on-disk store of computed results: keyed by digests, so an entry cannot go stale."""

from fsdptool.cache.store import Store, cache_folder

__all__ = ["Store", "cache_folder"]
