"""The SVG of a replay: well formed, with one coloured curve for each run, and open gaps."""

from xml.etree import ElementTree

from pagewire.simulator.plot import plot_svg

SVG = "{http://www.w3.org/2000/svg}"


def test_curves_are_scaled_to_their_panel() -> None:
    panels = {"a < b": {"one": [0.0, 50.0, 100.0], "two": [None, 25.0, 50.0]}}
    seconds = {"one": [60.0, 120.0, 180.0], "two": [60.0, 120.0, 180.0]}
    root = ElementTree.fromstring(plot_svg("title & more", panels, seconds))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "title & more" in texts
    assert "a < b" in texts
    assert {"one", "two", "100", "75", "3 min", "0 min"} <= set(texts)
    one, two = root.iter(f"{SVG}path")
    points = [tuple(map(float, p[1:].split(","))) for p in one.attrib["d"].split()]
    (left, bottom), (_, middle), (right, top) = points
    assert right - left > 400
    assert bottom - middle == middle - top > 20
    assert two.attrib["d"].count("M") == 1
    assert len(two.attrib["d"].split()) == 2
    assert one.attrib["stroke"] != two.attrib["stroke"]


def test_a_gap_lifts_the_pen_and_nothing_to_show_is_an_empty_panel() -> None:
    gapped = plot_svg("t", {"p": {"r": [1.0, None, 2.0]}}, {"r": [1.0, 2.0, 3.0]})
    (path,) = ElementTree.fromstring(gapped).iter(f"{SVG}path")
    assert path.attrib["d"].count("M") == 2
    empty = plot_svg("t", {"p": {"r": [None]}}, {"r": [1.0]})
    (path,) = ElementTree.fromstring(empty).iter(f"{SVG}path")
    assert path.attrib["d"] == ""
