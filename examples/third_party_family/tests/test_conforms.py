"""The conformance test that a plugin's author runs on a family."""

from fsdptool_gatedconv import GatedConvFamily

from fsdptool.testing.families import assert_conforms


def test_every_flavour_conforms() -> None:
    verdicts = assert_conforms(GatedConvFamily())
    assert {verdict.reference for verdict in verdicts} == {"gatedconv:small", "gatedconv:base"}
    assert all(verdict.wrap == ("GatedConvBlock",) for verdict in verdicts)
