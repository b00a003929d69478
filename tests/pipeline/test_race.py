"""T6, H04, P10: drivers at once over one archive, stepped by a seeded scheduler, with payloads of different bytes.

Each call of the store waits for its turn, and who is next is drawn at every call.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from operators.program import Literal, Node
from operators.run import encode
from pipeline import archive, encoder
from pipeline.cli import main
from tests.invariants import Watched
from tests.memory_store import MemoryStore, reach
from tests.pipeline.commands import Patch
from tests.pipeline.runs import SteppedStore, Turns
from tests.pipeline.test_crash import PLAIN, source

SAME, OTHER = (), ("--set", "synth.depth=2")
"""A recipe, and one that makes another run of the same source."""


class Race:
    """Drivers in threads of this process."""

    def __init__(self, patch: Patch) -> None:
        self.origin = source()
        self.stores: dict[str, Any] = {"test://source": self.origin}
        reach(patch, self.stores)
        patch.setattr(archive, "REQUESTS", 1)
        patch.setattr("signal.signal", lambda *_: None)  # which only the main thread may call
        patch.setattr(encoder, "encode", self.encode)

    @staticmethod
    def encode(program: Node, *arguments: Any, **named: Any) -> Any:
        """Encode; in every other thread as plain bytes, as another version of a library might."""
        plain = threading.current_thread().name.endswith("1")
        return encode(Node(Literal("raw")) if plain else program, *arguments, **named)

    def run(self, seed: int, *recipes: tuple[str, ...]) -> MemoryStore:
        """Run a driver for each of `recipes` at once; check what is left, and that the next night goes on."""
        shared = MemoryStore()
        turns = Turns(seed, len(recipes))
        codes: dict[int, int] = {}

        def drive(me: int) -> None:
            turns.pass_on(me)
            try:
                codes[me] = main(["archive", "test://source", f"test://archive-{me}", *PLAIN, *recipes[me], "-q"])
            finally:
                turns.pass_on(me, leave=True)

        threads = []
        for me in range(len(recipes)):
            view = SteppedStore(shared.objects, turns, me)
            view.written = shared.written
            self.stores[f"test://archive-{me}"] = view
            threads.append(threading.Thread(target=drive, args=(me,), name=f"driver-{me}"))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        watched = Watched(shared)
        snapshots = watched.check(self.origin.objects)
        assert len(codes) == len(recipes)
        assert set(codes.values()) <= {0, 11}
        won = [recipes[me] for me, code in codes.items() if code == 0]
        assert won, "somebody commits"
        assert len(snapshots) == len({snapshot.recipe for snapshot in snapshots}) == len(set(won))
        if len(set(recipes)) == 1:
            assert list(codes.values()) == [0] * len(recipes)  # twins both report success
        self.stores["test://archive"] = shared
        for recipe in recipes:
            assert main(["archive", "test://source", "test://archive", *PLAIN, *recipe, "-q"]) == 0
        assert len(watched.check(self.origin.objects)) >= len(set(recipes))
        return shared


@pytest.fixture
def race(monkeypatch: Patch) -> Race:
    return Race(monkeypatch)


RECIPES = [(SAME, SAME), (SAME, OTHER), (SAME, OTHER, SAME)]


@pytest.mark.parametrize("recipes", RECIPES, ids=["twins", "rivals", "both"])
def test_drivers_at_once_end_consistent(race: Race, recipes: tuple[tuple[str, ...], ...]) -> None:
    for seed in range(16):
        race.run(seed, *recipes)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipes", RECIPES, ids=["twins", "rivals", "both"])
def test_drivers_at_once_end_consistent_in_any_order(race: Race, recipes: tuple[tuple[str, ...], ...]) -> None:
    for seed in range(1000, 1170):
        race.run(seed, *recipes)


def test_the_drivers_do_write_different_bytes(race: Race) -> None:
    alone = []
    for name in ("driver-0", "driver-1"):
        store = race.stores["test://archive"] = MemoryStore()
        command = ["archive", "test://source", "test://archive", *PLAIN, "-q"]
        thread = threading.Thread(target=main, args=(command,), name=name)
        thread.start()
        thread.join()
        alone.append({key for key in store.objects if key.startswith("packs/")})
    assert alone[0] != alone[1]


def test_a_commit_that_overwrites_is_found_out(race: Race, monkeypatch: Patch) -> None:
    """Without create-only puts, rivals lose a snapshot or change an object."""

    def put_over(self: MemoryStore, key: str, data: bytes) -> None:
        self._called("put_new", key)
        self.objects[key] = data
        self.written[key] = self.clock

    monkeypatch.setattr(MemoryStore, "put_new", put_over)
    monkeypatch.setattr(MemoryStore, "supports_create_only", lambda _: True)

    def races() -> None:
        for seed in range(20):
            race.run(seed, SAME, OTHER)

    with pytest.raises(AssertionError):
        races()
