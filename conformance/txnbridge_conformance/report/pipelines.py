"""The report in the formats that pipelines show: JUnit's XML, and a summary in Markdown."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(document: dict[str, Any]) -> str:
    """Return a report's document as XML: a test for the floor, and for each promise, finding and capability."""
    suite, counts = ElementTree.Element("testsuite", name="txnbridge conformance"), Counter[str]()
    for kind, name, verdict, text in _tests(document):
        case = ElementTree.SubElement(suite, "testcase", classname=f"txnbridge.{kind}", name=name)
        counts["tests"] += 1
        if verdict != "kept":
            counts["failures" if verdict == "broken" else "skipped"] += 1
            result = ElementTree.SubElement(case, "failure" if verdict == "broken" else "skipped", message=verdict)
            result.text = _NOT_IN_XML.sub("?", text)
    suite.attrib.update({name: str(counts[name]) for name in ("tests", "failures", "skipped")})
    return ElementTree.tostring(suite, "unicode") + "\n"


def _tests(document: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Yield kind, name, verdict and text of each test. It fails if the verdict is "broken"."""

    def verdict(given: str, *names: str) -> str:
        return "allowed" if given == "broken" and not {*names} & {*document["failing"]} else given

    yield "floor", "enough was tried", "broken" if document["missing"] else "kept", document["sentence"]
    for promise in document["promises"]:
        yield "promise", promise["name"], verdict(promise["verdict"], *promise["broken by"]), promise["evidence"]
    for finding in document["findings"]:
        given = "broken" if finding["breaks a promise"] else "no promise excludes it"
        cases = "\n".join(case["text"] for case in finding["cases"][:5])
        yield "finding", finding["name"], verdict(given, finding["name"]), f"{finding['meaning']}\n{cases}"
    for result in document["contract"]:
        yield "contract", result["name"], verdict(result["verdict"], result["name"]), "\n".join(result["failed"])


def markdown(document: dict[str, Any]) -> str:
    """Return a report's verdict, promises and findings as Markdown, for the summary of a pipeline's step."""
    lines = [f"### {document['sentence']}", "", "| promise | verdict | evidence |", "|---|---|---|"]
    lines += [f"| {each['name']} | {each['verdict']} | {each['evidence']} |" for each in document["promises"]]
    lines += ["", *(f"- `{each['name']}`, {each['times']:,} times: {each['meaning']}" for each in document["findings"])]
    lines += [f"- broken by the contract suite: `{each['name']}`" for each in document["contract"] if each["failed"]]
    return "\n".join([*lines, *(f"- {line}" for line in document["baseline"]), ""])
