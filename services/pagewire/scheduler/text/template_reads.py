"""What a chat template reads, found in its syntax: variables, and fields of messages.

The search follows the conversation through assignments, loops, macros and filters. Where it loses
track of a message, such as in `message | tojson` or `message[key]`, the template may read any
field. So a field that is not found cannot change the rendered text.
"""

from jinja2 import Environment, nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser

Kinds = frozenset[str]

# What a value may hold. A value of no kind cannot lead to a message.
_NONE: Kinds = frozenset()
_LIST: Kinds = frozenset({"messages"})
_MESSAGE: Kinds = frozenset({"message"})
# Filters of messages, by their results; the last ones read a field. Tests that read no field.
_SAME = ("list", "reverse", "default")
_ONE = ("first", "last")
_COUNTS = ("length", "count")
_CHOICES = ("selectattr", "rejectattr")
_SHAPES = ("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number")


class _Generation(Extension):
    """transformers' tag around the assistant's text; it renders its body."""

    tags = {"generation"}  # noqa: RUF012, jinja2 types it as an instance's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_PARSER = Environment(extensions=["jinja2.ext.loopcontrols", _Generation])
_PARSER.globals.clear()  # a variable of a request replaces a global of the same name


def template_reads(source: str) -> tuple[frozenset[str], frozenset[str] | None]:
    """The variables of a template, and the fields of messages that it reads; None for any field.

    TemplateSyntaxError if it does not parse.
    """
    tree = _PARSER.parse(source)
    search = _Search(tree)
    fields = None if search.lost else frozenset(search.found)
    return frozenset(find_undeclared_variables(tree)), fields


class _Search:
    """Follows the messages until nothing new is found.

    Scopes are not told apart: a name has the kinds of all its values. Attributes of namespaces are
    names that begin with a dot.
    """

    def __init__(self, tree: nodes.Template) -> None:
        self.found: set[str] = set()
        self.lost = False
        # A loop leads to the messages before and after.
        self._kinds: dict[str, Kinds] = {"messages": _LIST, "loop": _MESSAGE}
        self._macros = list(tree.find_all(nodes.Macro))
        before = None
        while before != self._kinds:
            before = dict(self._kinds)
            self._visit(tree)

    def _visit(self, node: nodes.Node) -> None:
        """Reads a statement and those in it."""
        match node:
            case nodes.Assign():
                self._bind(node.target, self._value(node.node))
                return
            case nodes.For():
                kinds = self._value(node.iter)
                self._lose_if(kinds & _MESSAGE)  # the loop is over its keys
                self._bind(node.target, _MESSAGE if kinds else _NONE)
        if isinstance(node, nodes.For | nodes.If) and node.test is not None:
            self._value(node.test)  # a message is true, whatever its fields are
        for child in node.iter_child_nodes(exclude=("args", "iter", "target", "test")):
            if isinstance(child, nodes.Expr):
                self._use(child)
            else:
                self._visit(child)

    def _bind(self, target: nodes.Node, kinds: Kinds) -> None:
        if isinstance(target, nodes.Name | nodes.NSRef):
            name = target.name if isinstance(target, nodes.Name) else f".{target.attr}"
            self._kinds[name] = self._kinds.get(name, _NONE) | kinds
        else:
            self._lose_if(kinds)

    def _lose_if(self, lost: object) -> None:
        self.lost = self.lost or bool(lost)

    def _use(self, *values: nodes.Node | None) -> None:
        """Reads expressions whose results may show every field of a message."""
        for value in values:
            self._lose_if(value is not None and self._value(value))

    def _value(self, node: nodes.Node) -> Kinds:
        """Reads an expression; returns the kinds of its value."""
        match node:
            case nodes.Name():
                return self._kinds.get(node.name, _NONE)
            case nodes.Getattr(node=owner, attr=name):
                return self._field(owner, name)
            case nodes.Getitem(node=owner, arg=nodes.Const(value=str(name))):
                return self._field(owner, name)
            case nodes.Getitem(node=owner, arg=place):
                self._use(place)
                kinds = self._value(owner)
                self._lose_if(kinds & _MESSAGE)
                return kinds if isinstance(place, nodes.Slice) or not kinds else _MESSAGE
            case nodes.Compare(
                expr=nodes.Const(value=str(name)),
                ops=[nodes.Operand(op="in" | "notin", expr=owner)],
            ):
                self._field(owner, name)
                return _NONE
            case nodes.Test(node=tested, name=name):
                self._lose_if(self._value(tested) and name not in _SHAPES)
                self._use(*node.args, *node.kwargs, node.dyn_args, node.dyn_kwargs)
                return _NONE
            case nodes.And() | nodes.Or() | nodes.Add():
                return self._value(node.left) | self._value(node.right)
            case nodes.CondExpr(test=test, expr1=one, expr2=other):
                self._value(test)
                return self._value(one) | (_NONE if other is None else self._value(other))
            case nodes.List() | nodes.Tuple():
                return _LIST if _NONE.union(*map(self._value, node.items)) else _NONE
            case nodes.Call():
                return self._call(node)
            case nodes.Filter():
                return self._filter(node)
        self._use(*node.iter_child_nodes())
        return _NONE

    def _field(self, owner: nodes.Node, name: str) -> Kinds:
        if self._value(owner):
            self.found.add(name)
            self._lose_if(hasattr(dict, name))  # a method, such as `items`
        of_loop = name in ("previtem", "nextitem")
        return _MESSAGE if of_loop else self._kinds.get(f".{name}", _NONE)

    def _call(self, call: nodes.Call) -> Kinds:
        match call:
            case nodes.Call(
                node=nodes.Getattr(node=owner, attr="get"),
                args=[nodes.Const(value=str(name)), *others],
            ):
                self._use(*others, *call.kwargs, call.dyn_args, call.dyn_kwargs)
                return self._field(owner, name)
            case nodes.Call(
                node=nodes.Name(name="namespace"), args=[], dyn_args=None, dyn_kwargs=None
            ):
                for each in call.kwargs:
                    self._bind(nodes.NSRef("", each.key), self._value(each.value))
                # Like a message, a namespace may show what it has.
                holds = any(kinds for name, kinds in self._kinds.items() if name.startswith("."))
                return _MESSAGE if holds else _NONE
            case nodes.Call(node=nodes.Name(name=name), dyn_args=None, dyn_kwargs=None):
                if macros := [macro for macro in self._macros if macro.name == name]:
                    for macro in macros:
                        self._pass(call, macro)
                    return _NONE
        self._use(*call.iter_child_nodes())
        return _NONE

    def _pass(self, call: nodes.Call, macro: nodes.Macro) -> None:
        """Binds the arguments of a call to the parameters of a macro."""
        params: dict[str, nodes.Node] = {each.name: each for each in macro.args}
        given = [*zip(params, call.args, strict=False)]
        given += [(each.key, each.value) for each in call.kwargs]
        for name, value in given:
            if name in params:
                self._bind(params[name], self._value(value))
            else:
                self._use(value)
        self._use(*call.args[len(params) :])

    def _filter(self, node: nodes.Filter) -> Kinds:
        self._use(*node.args, *node.kwargs, node.dyn_args, node.dyn_kwargs)
        kinds = _NONE if node.node is None else self._value(node.node)
        if not kinds or (node.name in _COUNTS and kinds == _LIST):
            return _NONE
        if node.name in (*_SAME, *_ONE) and kinds == _LIST:
            return kinds if node.name in _SAME else _MESSAGE
        match node.args:
            case [nodes.Const(value=str(name)), *_] if node.name in _CHOICES:
                self.found.add(name.partition(".")[0])
                return kinds
        self.lost = True
        return _NONE
