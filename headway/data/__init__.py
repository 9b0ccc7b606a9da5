"""Data sets by name, and the world that is made rather than downloaded."""

from headway.data.catalog import DATA_SETS, DataFile, DataSet, DataSetStatus, data_home, get, resolve, status
from headway.data.world import Person, World, WorldSettings, make_world, write_world

__all__ = [
    "DATA_SETS",
    "DataFile",
    "DataSet",
    "DataSetStatus",
    "Person",
    "World",
    "WorldSettings",
    "data_home",
    "get",
    "make_world",
    "resolve",
    "status",
    "write_world",
]
