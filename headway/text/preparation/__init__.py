"""From files of any size to token shards, in bounded memory: sources → blocks → workers → shards."""

from headway.text.preparation.pipeline import prepare

__all__ = ["prepare"]
