"""Tests of what the runtime keeps of models that are gone: their names and why they are gone, and nothing that their
loads brought.
"""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path

import numpy as np
import pytest
from tests.ensemble_repositories import write_model
from tests.inside import hosted_in, registry_of
from tests.waiting import wait_until

import moonpool
from moonpool.runtime.observe.statistics import MOST_BATCH_SIZES
from moonpool.runtime.repository.loading import Wanted

pytestmark = pytest.mark.promise(
    "Lifecycle",
    "Of models that were unloaded or failed to load, the runtime keeps names and reasons, of bounded size, and no "
    "files or configurations.",
)


class Files(dict[str, bytes]):
    """To these there can be weak references."""


def test_a_load_that_failed_keeps_no_files() -> None:
    files = Files({"1/model.py": b"", "1/large": b"x"})
    kept = weakref.ref(files)
    with moonpool.Runtime() as runtime:
        with pytest.raises(moonpool.MoonpoolError):
            registry_of(runtime).load(Wanted("m", files=files, config={"max_batch_size": -1}, is_whole=True))
        del files
        gc.collect()
        assert kept() is None
        failure = registry_of(runtime).statuses()["m"].failure
        assert failure is not None
        assert "max_batch_size" in failure.text


def test_a_model_has_its_files_on_the_disk_and_is_gone_with_its_unload(tmp_path: Path) -> None:
    write_model(tmp_path, "m")
    names = "config.pbtxt", "1/model.py"
    files = Files({name: (tmp_path / "m" / name).read_bytes() for name in names})
    kept_files = weakref.ref(files)
    with moonpool.Runtime() as runtime:
        registry_of(runtime).load(Wanted("m", files=files, config={}, is_whole=False))
        del files
        gc.collect()
        assert kept_files() is None
        kept = weakref.ref(hosted_in(runtime, "m"))
        runtime.unload("m")
        wait_until(lambda: gc.collect() >= 0 and kept() is None)
        (version,) = registry_of(runtime).statuses()["m"].versions
        assert version.reason == "unloaded"


def test_a_name_that_no_model_can_have_is_not_kept() -> None:
    with moonpool.Runtime() as runtime:
        with pytest.raises(moonpool.MoonpoolError, match="must be 1 to 512"):
            registry_of(runtime).load(Wanted("n" * 1_000_000))
        assert registry_of(runtime).statuses() == {}


@pytest.mark.promise(
    "Watching a server",
    "Statistics have 4096 sizes of batches of a model version at most; further ones count in all other figures.",
)
def test_executions_count_whatever_their_size(tmp_path: Path) -> None:
    write_model(tmp_path, "m", more="max_batch_size: 8")
    with moonpool.Runtime(tmp_path) as runtime:
        statistics = hosted_in(runtime, "m").scheduler.statistics
        statistics._batches |= {8 + more: [1, 0, 0, 0] for more in range(MOST_BATCH_SIZES - 1)}

        def ask() -> None:
            for rows in (2, 3) * 2:
                runtime.infer("m", {"X": np.zeros((rows, 3), np.float32)})

        # Quick forms count those of other threads, once they know the shapes.
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        shown = runtime.statistics("m")
    assert shown["inference_count"] == 10
    assert len(shown["batch_stats"]) == MOST_BATCH_SIZES
    assert [each["batch_size"] for each in shown["batch_stats"][:2]] == [2, 8]
