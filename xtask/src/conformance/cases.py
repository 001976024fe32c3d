"""Prints one line for each case of a JUnit file of CPython's regrtest: its name and its verdict."""
import sys
import xml.etree.ElementTree as tree

for case in tree.parse(sys.argv[1]).iter("testcase"):
    kinds = {child.tag for child in case} & {"error", "failure", "skipped"}
    print(case.get("name"), " ".join(sorted(kinds)) or "passed")
