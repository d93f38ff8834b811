"""Rank tables: frozen, and a replacement sits exactly where the dead node sat."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ftlab.membership import RankTable, Verdict, seat_nodes

NODES = [("node-0", "127.0.1.1"), ("node-1", "127.0.1.2"), ("node-2", "127.0.1.3")]


def test_nodes_are_seated_in_order_each_with_all_its_workers():
    table = seat_nodes(3, NODES[:2], 2)
    assert [(seat.rank, seat.node, seat.address, seat.local_rank) for seat in table.seats] == [
        (0, "node-0", "127.0.1.1", 0), (1, "node-0", "127.0.1.1", 1),
        (2, "node-1", "127.0.1.2", 0), (3, "node-1", "127.0.1.2", 1)]
    assert (table.generation, table.world, table.nodes) == (3, 4, ("node-0", "node-1"))


@pytest.mark.parametrize(("node", "local_rank", "rank"), [
    ("node-0", 0, 0), ("node-1", 1, 3), ("node-1", 2, None), ("node-7", 0, None), ("", -1, None)])
def test_a_worker_finds_its_rank_or_that_it_has_none(node, local_rank, rank):
    assert seat_nodes(1, NODES[:2], 2).rank_of(node, local_rank) == rank


def test_a_node_knows_its_ranks():
    table = seat_nodes(1, NODES, 2)
    assert table.ranks_of("node-1") == (2, 3) and table.ranks_of("node-9") == ()


def test_a_table_survives_the_way_through_json():
    table = seat_nodes(5, NODES, 2)
    assert RankTable.from_dict(json.loads(json.dumps(table.to_dict()))) == table


def test_a_table_cannot_be_changed():
    table = seat_nodes(1, NODES, 1)
    for change in (lambda: setattr(table, "generation", 2), lambda: setattr(table.seats[0], "node", "node-9")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    assert isinstance(table.seats, tuple)


def test_verdicts_are_written_as_they_are_said():
    assert [str(verdict) for verdict in Verdict] == ["ALIVE", "SUSPECT", "DEAD"]
