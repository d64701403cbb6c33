"""The on-disk store of derived answers: keyed by digests, so an entry cannot go stale."""

from fsdptool.cache.store import Cleared, Entry, Store, Verdict, cache_folder

__all__ = ["Cleared", "Entry", "Store", "Verdict", "cache_folder"]
