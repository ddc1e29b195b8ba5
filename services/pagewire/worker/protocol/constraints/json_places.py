"""Where in an output of a schema a text ends, as far as that decides what may come next."""

from typing import NamedTuple

from pagewire.worker.protocol.constraints.json_shapes import Kind, Shape

# Bytes of a text that a place may remember; one of more is not found again.
MAX_TEXT = 48
# Of nested values, and of the names of an object that is open.
MAX_DEPTH = 32
MAX_NAMES = 100

_SPACE = b" \n\t\r"
_ESCAPES = b'"\\/bfnrt'
_HEX = 3  # `quoted` is so much more than the hexadecimal digits that an escape still lacks,
_TAIL = 10  # or so much more than the bytes that a character still lacks
_INSIDE, _ESCAPED = 1, 2


class Stage:
    """What a text ends with. Plain numbers, since an Enum's hash is slow."""

    VALUE = 1  # a value must follow
    FIRST = 2  # the beginning of an object or array
    KEY = 3  # a comma in an object
    NAME = 4  # within a name of a property
    COLON = 5  # a name
    STRING = 6  # within values
    NUMBER = 7
    OPAQUE = 8
    AFTER = 9  # a value in an object or array
    DONE = 10  # the whole value


# Stages whose text is white space.
_BETWEEN = frozenset((Stage.VALUE, Stage.FIRST, Stage.KEY, Stage.COLON, Stage.AFTER, Stage.DONE))


class Frame(NamedTuple):
    """An open object or array."""

    outer: "Frame | None"
    shape: Shape
    names: tuple[bytes | None, ...]  # of the properties so far; None for some not in the schema
    complete: int  # items
    depth: int

    def near(self, commas: int) -> "Frame":
        """The same for all frames from which tokens lead alike.

        A token has at most `commas` commas outside of strings.
        """
        outer, shape, names, count, depth = self
        if outer is not None:
            outer = outer.near(commas)
        if not shape.prefix:  # what comes behind a prefix is not the same for all counts
            count = _near(count, shape, commas + 1)
        return Frame(outer, shape, names, count, depth)


class Place(NamedTuple):
    """Texts that end at the same place may go on in the same ways."""

    frame: Frame | None
    stage: int
    shape: Shape | None  # of the value that comes or has begun
    # Of what has begun: a name, a number, a value, white space. None: too long to remember.
    text: bytes | None = b""
    chars: int = 0  # of a string
    quoted: int = 0
    nested: int = 0  # objects and arrays that are open in an opaque value

    @property
    def raw(self) -> bool:
        """Whether few texts end here, most likely."""
        return self.stage == Stage.OPAQUE or self.stage == Stage.NAME

    @property
    def in_characters(self) -> bool:
        """Whether a string has begun and any character may follow, as far as its bounds go."""
        return self.stage == Stage.STRING and self.text == b"" and self.quoted == _INSIDE

    def with_plain(self, text: bytes, plain: bool) -> "Place | None":
        """`after`, for a text that only adds to the one here; None: ask `after`.

        `plain`: all its characters may be in a string as they are.
        """
        frame, stage, shape, before, chars, quoted, nested = self
        if stage == Stage.OPAQUE and not quoted:
            adds = not nested and text.isalnum()
        elif stage in _BETWEEN:
            adds = text.isspace()
        else:
            adds = plain and quoted == _INSIDE and (stage == Stage.OPAQUE or stage == Stage.NAME)
        if not adds or before is None or len(before) + len(text) > MAX_TEXT:
            return None
        return Place(frame, stage, shape, before + text, chars, quoted, nested)

    def longer(self, length: int) -> "Place":
        """The place behind so many characters, where `in_characters` holds."""
        shape = self.shape
        assert shape is not None
        if not shape.low and shape.high is None:
            return self
        return self._replace(chars=shape.clipped(self.chars + length))

    def after(self, text: bytes) -> "Place | None":
        """The place behind more text; None if that is not known, or no JSON of the schema."""
        walk = _Walk(self)
        return walk.place() if all(map(walk.take, text)) else None

    def near(self, frame: "Frame | None", length: int) -> "Place":
        """The same for all places that have the same tokens next, of at most `length` bytes each.

        `frame` is `Frame.near` of the place's frame.
        """
        _, stage, shape, text, chars, quoted, nested = self
        if stage == Stage.STRING and shape is not None:
            chars = _near(chars, shape, length)
        return Place(frame, stage, shape, text, chars, quoted, nested)


def _near(count: int, shape: Shape, most: int) -> int:
    """A count that is as far from both bounds, if `most` more do not reach them."""
    far = shape.high is None or count + most < shape.high
    if far and count >= shape.low:
        return -1
    if far and count + most < shape.low:
        return -2
    return count


_DIGIT = {ord(digit): b"1" for digit in "0123456789"}
_ZERO = {**_DIGIT, ord("0"): b"0"}
_EXPONENT = {ord("e"): b"1e", ord("E"): b"1e"}
_POINT = {ord("."): b"1.", **_EXPONENT}
# By a number so far, which stands for all that may go on alike, and the next byte.
_NUMBERS: dict[bytes, dict[int, bytes]] = {
    b"": {**_ZERO, ord("-"): b"-"},
    b"-": _ZERO,
    b"0": _POINT,
    b"1": {**_DIGIT, **_POINT},
    b"1.": dict.fromkeys(_DIGIT, b"1.0"),
    b"1.0": {**dict.fromkeys(_DIGIT, b"1.0"), **_EXPONENT},
    b"1e": {**dict.fromkeys(_DIGIT, b"1e0"), ord("+"): b"1e-", ord("-"): b"1e-"},
    b"1e-": dict.fromkeys(_DIGIT, b"1e0"),
    b"1e0": dict.fromkeys(_DIGIT, b"1e0"),
}


class _Walk:
    """A place that moves by bytes. Its steps say whether they were possible."""

    def __init__(self, place: Place) -> None:
        self.frame, self.stage, self.shape, self.text, self.chars, self.quoted, self.nested = place

    def place(self) -> Place:
        text, most = self.text, MAX_TEXT
        if self.stage == Stage.NAME and self.frame is not None:
            most = max(most, self.frame.shape.longest_name)  # None is no name of the schema
        if text is not None and len(text) > most:
            text = None
        return Place(self.frame, self.stage, self.shape, text, self.chars, self.quoted, self.nested)

    def take(self, byte: int) -> bool:
        stage = self.stage
        if stage == Stage.STRING:
            return self._string(byte)
        if stage == Stage.OPAQUE:
            return self._opaque(byte)
        if stage == Stage.NUMBER:
            assert self.text is not None
            longer = _NUMBERS[self.text].get(byte)
            if longer is not None:
                self.text = longer
                return True
            return self._end() and self.take(byte)
        if stage == Stage.NAME:
            return self._name(byte)
        if byte in _SPACE:
            self._add(byte)
            return True
        return self._structure(byte)

    def _add(self, byte: int) -> None:
        if self.text is not None:
            self.text += bytes((byte,))

    def _structure(self, byte: int) -> bool:
        stage, frame = self.stage, self.frame
        if stage == Stage.VALUE:
            return self._begin(byte)
        if stage == Stage.COLON and byte == ord(":"):
            self.stage, self.text = Stage.VALUE, b""
            return True
        if frame is None or stage == Stage.COLON:
            return False
        array = frame.shape.kind == Kind.ARRAY
        if stage != Stage.KEY and byte == ord("]" if array else "}"):
            self.frame = frame.outer
            return self._end()
        if stage == Stage.AFTER:
            if byte != ord(","):
                return False
            self.stage, self.text = Stage.KEY, b""
            if array:
                self.stage, self.shape = Stage.VALUE, frame.shape.item(frame.complete)
            return True
        if array:
            self.shape = frame.shape.item(frame.complete)
            return self._begin(byte)
        self.stage, self.text, self.quoted = Stage.NAME, b"", _INSIDE
        return byte == ord('"')

    def _begin(self, byte: int) -> bool:
        """The first byte of a value."""
        shape = self.shape
        if shape is None:
            return False
        kind = shape.kind
        self.text, self.chars, self.quoted, self.nested = b"", 0, 0, 0
        if kind == Kind.STRING:
            self.stage, self.quoted = Stage.STRING, _INSIDE
            return byte == ord('"')
        if kind == Kind.NUMBER:
            self.stage, self.text = Stage.NUMBER, _NUMBERS[b""].get(byte, b"")
            return bool(self.text)
        if kind == Kind.OPAQUE:
            self.stage, self.text = Stage.OPAQUE, bytes((byte,))
            self.quoted = _INSIDE if byte == ord('"') else 0
            self.nested = 1 if byte in b"{[" else 0
            return byte not in b",:]}"
        depth = 1 if self.frame is None else self.frame.depth + 1
        self.frame = Frame(self.frame, shape, (), 0, depth)
        self.stage, self.shape = Stage.FIRST, None
        return byte == ord("[" if kind == Kind.ARRAY else "{") and depth <= MAX_DEPTH

    def _end(self) -> bool:
        """A value is complete."""
        frame = self.frame
        self.stage = Stage.DONE if frame is None else Stage.AFTER
        self.shape, self.text, self.chars, self.quoted, self.nested = None, b"", 0, 0, 0
        if frame is not None and frame.shape.kind == Kind.ARRAY:
            self.frame = frame._replace(complete=frame.shape.clipped(frame.complete + 1))
        return True

    def _name(self, byte: int) -> bool:
        frame, name = self.frame, self.text
        assert frame is not None
        if self.quoted == _ESCAPED:
            self.quoted = _INSIDE
        elif byte == ord("\\"):
            self.quoted = _ESCAPED
        elif byte == ord('"'):
            known = None if name is None else frame.shape.properties.get(name)
            self.shape = frame.shape.others if known is None else known
            added = None if known is None else name
            if added is not None or frame.names[-1:] != (None,):
                self.frame = frame._replace(names=(*frame.names, added))
            self.stage, self.text, self.quoted = Stage.COLON, b"", 0
            return self.shape is not None and len(frame.names) < MAX_NAMES
        self._add(byte)
        return True

    def _opaque(self, byte: int) -> bool:
        if self.quoted == _ESCAPED:
            self.quoted = _INSIDE
        elif self.quoted:
            if byte == ord("\\"):
                self.quoted = _ESCAPED
            elif byte == ord('"'):
                self.quoted = 0
                if not self.nested:
                    return self._end()
        elif not self.nested:
            if byte in _SPACE or byte in b",]}":
                return self._end() and self.take(byte)
        elif byte == ord('"'):
            self.quoted = _INSIDE
        elif byte in b"{[":
            self.nested += 1
        elif byte in b"]}":
            self.nested -= 1
            if not self.nested:
                return self._end()
        self._add(byte)
        return True

    def _string(self, byte: int) -> bool:
        quoted = self.quoted
        if quoted == _INSIDE:
            if byte == ord('"'):
                return self._end()
            if byte == ord("\\"):
                self.quoted = _ESCAPED
                self._add(byte)
            elif byte >= 0x80:
                lacking = 1 if byte < 0xE0 else 2 if byte < 0xF0 else 3
                self.quoted = _TAIL + lacking
                self._add(byte)
                return 0xC2 <= byte <= 0xF4
            else:
                self._character(0)
                return byte >= 0x20 and byte != 0x7F
            return True
        self._add(byte)
        if quoted == _ESCAPED:
            if byte in _ESCAPES:
                self._character(2)
                return True
            self.quoted = _HEX + 4
            return byte == ord("u")
        self.quoted -= 1
        if quoted > _TAIL:
            if self.quoted == _TAIL:
                size = 1
                while self.text is not None and self.text[-size] & 0xC0 == 0x80:
                    size += 1
                self._character(size)
            return byte & 0xC0 == 0x80
        if self.quoted == _HEX:
            self.quoted = _INSIDE
        return True

    def _character(self, size: int) -> None:
        """A character is complete, the last `size` bytes of the text.

        All have the same next, but for an escape by its number, which stays in the text.
        """
        self.quoted = _INSIDE
        if self.text is None:
            return
        text = self.text[: len(self.text) - size]
        if text:
            self.text = text + b"a"
            return
        self.text = text
        if self.shape is not None and (self.shape.low or self.shape.high is not None):
            self.chars = self.shape.clipped(self.chars + 1)
