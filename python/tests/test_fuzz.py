import os

import fuzz


def test_damaged_packages_are_python_exceptions(linear, conv, ranged, picture, classifier, counter, functions):
    packages = [linear, conv, ranged, picture, classifier, counter, functions]
    runs = int(os.environ.get("ANEMOE_FUZZ_RUNS", "150"))
    assert fuzz.main(packages, runs, 1) == []
