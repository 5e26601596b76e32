"""The tests that the usual run leaves out: `pytest -m thorough` runs these alone, and `.ci/run thorough` does.

They take more than half of the whole time. Most repeat what quicker tests try, too: for longer, in more variants,
under a sanitizer or beside a whole tritonserver. Others are here for their time alone. Run them before a release, and
after a change to what they are about.
"""

from __future__ import annotations

import pytest

# Beginnings of the tests' names, with the file.
TESTS = (
    # Sanitizers. `tests/fuzz` and the tests of lies run without them each time.
    "tests/runtime/lane/test_sanitized.py",
    "tests/server/grpc/test_sanitized.py",
    "tests/stub/peers/test_sanitized.py",
    "tests/triton/sanitized",
    # The types of a user's program, by two type checkers.
    "tests/testing/test_type_information.py",
    # The attacks again as another user. Part `strict` of CI runs models as one.
    "tests/hostile/test_as_nobody.py",
    # Many variants of the same.
    "tests/e2e/test_strange_contents.py",
    "tests/server/page/test_hostile_pages.py",
    "tests/hostile/test_granted_folders.py::test_where_no_ids_are_mapped",
    # Long runs. Part `pure` of CI has chaos.
    "tests/chaos",
    "tests/e2e/test_crash_matrix.py",
    "tests/e2e/test_prints.py",
    "tests/e2e/test_soak.py",
    "tests/ray/test_local_server.py",
    "tests/benchmarks/commands/test_tune.py",
    "tests/benchmarks/test_timeline.py",
    "tests/benchmarks/commands/test_bench",
    "tests/runtime/cli/test_offers.py",
    "tests/e2e/test_prefork.py",
    "tests/e2e/test_sleep_hooks.py",
    "tests/server/observability/test_capture.py",
    "tests/server/test_cloud_repository.py",
    "tests/server/test_port_limits.py",
    # In a browser.
    "tests/server/page/test_page.py",
    # Comparisons with a tritonserver of their own, and the library inside one.
    "tests/runtime/triton/test_launcher.py",
    "tests/runtime/triton/test_codec.py",
    "tests/runtime/triton/test_lent_stubs.py",
    "tests/triton/backend",
    "tests/triton/overlay",
    "tests/triton/test_watching.py",
    # Each benchmark in its quick form, but for those below, and what runs several of them.
    "tests/benchmarks/test_suites.py::test_a_benchmark_answers_its_question",
    "tests/benchmarks/test_suites.py::test_all_runs",
    "tests/benchmarks/test_suites.py::test_compare_sets",
    "tests/benchmarks/test_suites.py::test_trips_to_a_gpu",
    # What runs on a machine with a card, on the fake driver.
    "tests/card",
    # The suite's own namespaces.
    "tests/test_spaces.py",
    # What pages and packages say, with installations. Part `wheel` of CI makes a distribution.
    "tests/e2e/test_packed_environments.py",
    "tests/runtime/cli/test_environments.py",
    "tests/runtime/repository/test_environment_builder.py",
    "tests/test_package.py::test_a_source_distribution_is_the_repository",
    "tests/deploy/test_dockerfile.py",
    "tests/test_docs.py::test_the_blocks_of_a_page_run[docs/BENCH.md]",
    "tests/e2e/test_lying_templates.py",
    "tests/runtime/repository/test_archive_formats.py",
)
# The usual run takes these all the same.
USUAL = tuple(
    f"tests/benchmarks/test_suites.py::test_a_benchmark_answers_its_question[{name}]" for name in ("latency", "mixed")
)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of the list."""
    if item.nodeid.startswith(TESTS) and not item.nodeid.startswith(USUAL):
        item.add_marker(pytest.mark.thorough)
