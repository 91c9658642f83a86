"""Flags of a command, made by cyclopts from the fields of the command's record.

A command is a record (`voxlane.settings.record`) with the method `_run`. Its docstring is the text of --help:

    @record
    class LsCommand(StoreOptions):
        \"\"\"List the objects under a URI, or save them as a manifest.

        More paragraphs of --help, and examples as indented lines.
        \"\"\"

        uri: Annotated[PathOrUri, ARGUMENT]
        \"\"\"Bucket and prefix, or a folder.\"\"\"
        match: tuple[str, ...] = ()
        \"\"\"List only keys that match this pattern (repeatable); * crosses /.\"\"\"
        long: Annotated[bool, Flag("-l")] = False
        \"\"\"Print size and etag before each URI.\"\"\"
        concurrency: Annotated[int, pydantic.Field(ge=1)] = 64
        \"\"\"Number of list requests in flight.\"\"\"

        def _run(self) -> None:
            ...

Each field is one flag: its name with dashes, its type, its default, its docstring as help. A field without a default
is required. A `bool` is a switch; one whose default is True gets --no-NAME as well. A tuple is a flag that can be
repeated. A `Literal` has choices. `Flag` in `Annotated` sets everything else. Options that several commands share are
fields of a base class; its ClassVar `flag_group` gives them a heading of their own in --help. A command that can fail
without an exception returns its exit status from `_run`.

A flag may be written with underscores for its dashes: --save_only is --save-only.

Values of a wrong type, unknown flags and missing arguments raise UsageError (exit status 2). Values that the record
itself rejects raise ConfigError (exit status 1) with the flag's name.

`voxlane.cli.main` lists every command with its module.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, get_args, get_origin

import cyclopts
import cyclopts.exceptions as parsing
from pydantic_core import PydanticUndefined

from voxlane import settings
from voxlane.cli.help import did_you_mean, format_rows, format_text, terminal_width
from voxlane.errors import ConfigError, UsageError
from voxlane.settings import Flag

_TYPE_ERRORS = ("int_parsing", "float_parsing")


@dataclass(frozen=True)
class _Option:
    """One field of a command."""

    name: str
    field: Any
    flag: Flag
    is_own: bool
    """Whether the command itself declares it, and not a base class that it shares with others."""
    group: str
    """Heading in --help; empty: Options."""

    @property
    def names(self) -> tuple[str, ...]:
        """The long and the short flag, or the word that stands for an argument."""
        if self.flag.positional:
            return (self.flag.metavar or self.name.upper(),)
        long = self.flag.long or f"--{self.name.replace('_', '-')}"
        return (long, self.flag.short) if self.flag.short else (long,)

    @property
    def default(self) -> Any:
        """Value of the field when it is not given, or PydanticUndefined."""
        return self.field.get_default(call_default_factory=True)

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return bool(self.field.is_required())

    @property
    def repeated(self) -> bool:
        """Whether it takes any number of values."""
        return get_origin(self.field.annotation) is tuple

    @property
    def variadic(self) -> bool:
        """Whether it takes any number of positional words."""
        return self.flag.positional and self.repeated

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a Literal, also an optional or repeated one."""
        kinds = settings.nested_types(self.field.annotation)
        return next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())

    @property
    def negative(self) -> tuple[str, ...]:
        """Names that switch off a flag whose default is True."""
        return (f"--no-{self.name.replace('_', '-')}",) if self.default is True else ()

    @property
    def help(self) -> str:
        """The field's description, with its choices and its default."""
        notes = [" ".join((self.field.description or "").split())]
        if self.choices:
            notes.append(f"Choices: {', '.join(self.choices)}.")
        is_shown = not isinstance(self.default, bool) and self.default not in (None, (), "", PydanticUndefined)
        if is_shown and not self.flag.positional:
            notes.append(f"(default: {_format_default(self.default)})")
        return " ".join(notes)

    @property
    def metavar(self) -> str:
        """The word that stands for the value; empty for a switch."""
        kinds = settings.nested_types(self.field.annotation)
        if bool in kinds or self.flag.metavar:
            return self.flag.metavar
        if int in kinds or float in kinds:
            return "N"
        return "URI" if settings.is_path(self.field) else self.names[0].rpartition("-")[2].upper()

    def to_parameter(self) -> inspect.Parameter:
        """Return the function parameter from which cyclopts makes the flag. Values stay text for the record to convert,
        but cyclopts knows switches, choices and repeated flags."""
        kind: Any = bool if self.field.annotation is bool else Literal[self.choices] if self.choices else str
        if self.repeated and not self.flag.positional:
            kind = tuple[kind, ...]
        declared = cyclopts.Parameter(
            name=() if self.flag.positional else self.names,
            help=self.help,
            show=not self.flag.hidden,
            negative=self.negative,
            allow_repeating=True,
            required=self.required if self.variadic else None,
        )
        places = inspect.Parameter
        place: Any = places.POSITIONAL_ONLY if self.flag.positional else places.KEYWORD_ONLY
        place = places.VAR_POSITIONAL if self.variadic else place
        if self.required or self.variadic:
            return inspect.Parameter(self.name, place, annotation=Annotated[kind, declared])
        # A switch must not be optional, or completion takes the next word for its value.
        default, kind = (self.default, bool) if kind is bool else (None, kind | None)
        return inspect.Parameter(self.name, place, default=default, annotation=Annotated[kind, declared])


class CommandParser:
    """The parser of a command's flags."""

    def __init__(self, name: str, command_class: type[Any]) -> None:
        self.name = name
        self.command_class = command_class
        self._options: list[_Option] = []
        for field_name, field in settings.record_fields(command_class).items():
            owner = next(cls for cls in command_class.__mro__ if field_name in cls.__annotations__)
            group = "" if owner is command_class else getattr(owner, "flag_group", "")
            option = _Option(field_name, field, settings.flag_of(field), owner is command_class, group)
            self._options += [] if option.flag.excluded else [option]
        # Arguments that may be left out come after those that may not, as Python demands of parameters.
        self._options.sort(key=lambda o: (not o.flag.positional, o.variadic, o.flag.overrides, not o.is_own))
        self._overrides = next((option.name for option in self._options if option.flag.overrides), "")
        self._remainder = next((option.name for option in self._options if option.flag.remainder), "")
        self._flag_names = {name for option in self._options for name in (*option.names, *option.negative)}
        self.app = self._make_app()

    def _make_app(self) -> cyclopts.App:
        def function(*arguments: str, **values: Any) -> None:
            """Take any arguments; only its signature is used."""

        unparsed = (self._overrides, self._remainder)
        parameters = [option.to_parameter() for option in self._options if option.name not in unparsed]
        function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        summary = summary_of(self.command_class)
        app = cyclopts.App(self.name.split()[-1], help=summary, help_format="plaintext", version_flags=())
        app.default(function)
        return app

    def run(self, words: Sequence[str]) -> int:
        """Run the command with the options that `words` give, and return its exit status."""
        return self.parse(words)._run() or 0

    def parse(self, words: Sequence[str]) -> Any:
        """Return the command with the options that `words` give, or raise UsageError or ConfigError."""
        parsed_words, taken = self._split_words(words)
        try:
            _, bound, _ = self.app.parse_args(parsed_words, print_error=False, exit_on_error=False)
        except parsing.CycloptsError as error:
            raise self._usage_error(self._explain(error, parsed_words)) from None
        for option in self._options:
            if option.required and taken.get(option.name) == ():
                raise self._usage_error(f"missing {option.names[0]} after --")
        labels = {option.name: option.names[0] for option in self._options}
        try:
            return settings.build(self.command_class, {**bound.arguments, **taken}, labels=labels)
        except ConfigError as error:
            if error.code in _TYPE_ERRORS:
                raise self._usage_error(str(error)) from None
            raise

    def _usage_error(self, problem: str) -> UsageError:
        fix = "" if problem.endswith("?") else f"See: voxlane {self.name} --help"
        return UsageError(f"voxlane {self.name}: {problem}", fix=fix)

    def _split_words(self, words: Sequence[str]) -> tuple[list[str], dict[str, tuple[str, ...]]]:
        """Split the words that cyclopts parses from the values, by name, of the two options that it cannot parse:
        `field=value` overrides, which may stand anywhere, and the words of another command. Those come after `--` or,
        where the command has no other arguments, start with the first word that is neither a flag nor its value."""
        takes_value = {name: o.flag for o in self._options for name in o.names if o.field.annotation is not bool}
        has_arguments = any(option.flag.positional and not option.flag.remainder for option in self._options)
        parsed: list[str] = []
        overrides: list[str] = []
        standard_input: list[str] = []  # cyclopts takes a bare - for a flag unless it comes after --
        rest = list(words)
        while rest:
            word = self._with_dashes(rest.pop(0))
            if self._remainder and (word == "--" or not (has_arguments or word.startswith("-"))):
                rest = rest if word == "--" else [word, *rest]
                break
            if self._overrides and settings.is_override(word):
                overrides.append(word)
            elif word == "-":
                standard_input.append(word)
            elif word not in takes_value:
                parsed.append(word)
            else:
                parsed += _take_value(word, takes_value[word].bare_value, rest)
        taken = {self._overrides: tuple(overrides), self._remainder: tuple(rest)}
        parsed += ["--", *standard_input] if standard_input else []
        return parsed, {name: values for name, values in taken.items() if name}

    def _with_dashes(self, word: str) -> str:
        """Return a flag that is written with underscores as it is declared, and any other word unchanged."""
        flag, equals, value = word.partition("=")
        declared = flag.replace("_", "-")
        return declared + equals + value if declared in self._flag_names else word

    def _explain(self, error: parsing.CycloptsError, words: Sequence[str]) -> str:
        """Say in one line what is wrong with the words of a command line."""
        argument = error.argument
        flags = [word.split("=")[0] for word in words if word.startswith("--")]
        unknown = [flag for flag in flags if flag not in self._flag_names]
        labels = {option.name: option.names[0] for option in self._options}
        label = labels.get(argument.field_info.name, argument.name) if argument is not None else ""
        match error:
            case parsing.UnknownOptionError():
                return self._explain_unknown((error.token.keyword or error.token.value).split("=")[0])
            case parsing.MissingArgumentError() if unknown:  # probably a misspelt form of the missing one
                return self._explain_unknown(unknown[0])
            case parsing.MissingArgumentError() if error.keyword or (argument is not None and argument.tokens):
                return f"{error.keyword or label} expects a value"
            case parsing.MissingArgumentError():
                return f"missing {label}"
            case parsing.CoercionError() if error.token is not None:  # only choices are checked by cyclopts
                choices = " or ".join(", ".join(get_args(error.target_type)).rsplit(", ", 1))
                return f"{label}: expected {choices}, got {error.token.value!r}"
            case parsing.UnusedCliTokensError() if error.unused_tokens:
                hint = "; write config fields as field=value" if self._overrides else ""
                return f"unexpected argument {error.unused_tokens[0]!r}{hint}"
        return " ".join(str(error).split())

    def _explain_unknown(self, flag: str) -> str:
        field, config_class = (
            flag.removeprefix("--").replace("-", "_"),
            getattr(self.command_class, "config_class", None),
        )
        if config_class and field in settings.record_fields(resolve_name(config_class)):
            return f"unknown option {flag}: {field} is a config field, write {field}=VALUE"
        flags = ["--help", *(name for option in self._options for name in option.names if not option.flag.hidden)]
        return f"unknown option {flag}{did_you_mean(flag, flags)}"

    def format_help(self) -> str:
        """Return the text of --help."""
        width = terminal_width()
        arguments = [option for option in self._options if option.flag.positional]
        required = [f"{o.names[0]} {o.metavar}" for o in self._options if o.required and o not in arguments]
        usage = " ".join([f"Usage: voxlane {self.name}", *required, "[OPTIONS]", *map(_argument_usage, arguments)])
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for option in self._options:
            title = "Arguments" if option in arguments else option.group or "Options"
            names = ", ".join([*sorted(option.names, key=len), *option.negative])
            label = names if option in arguments else f"{names} {option.metavar}".rstrip()
            if not option.flag.hidden:
                sections.setdefault(title, []).append((label, option.help))
        sections["Options"].append(("-h, --help", "Show this text."))
        tables = [f"{title}:\n{format_rows(rows, width)}" for title, rows in sections.items() if rows]
        return "\n\n".join([usage, format_text(inspect.getdoc(self.command_class) or "", width), *tables]) + "\n"


def _take_value(flag: str, bare_value: str, rest: list[str]) -> list[str]:
    """Return a flag with its value, which is taken from the words after it, or is `bare_value` if they have none."""
    if bare_value and (not rest or rest[0].startswith("-")):
        return [f"{flag}={bare_value}"]
    return [flag, *(rest.pop(0) for _ in rest[:1])]


def _format_default(value: Any) -> str:
    """Return a default as a user types it: items without brackets, numbers without a trailing `.0`."""
    if isinstance(value, tuple):
        return ",".join(map(_format_default, value))
    return f"{value:g}" if isinstance(value, float) and value.is_integer() else settings.format_value(value)


def _argument_usage(option: _Option) -> str:
    if option.flag.remainder:
        return "-- COMMAND ..."
    usage = f"{option.names[0]} ..." if option.variadic else option.names[0]
    return usage if option.required else f"[{usage}]"


def summary_of(command_class: type[Any]) -> str:
    """Return the first line of a command's docstring, without its full stop."""
    return (inspect.getdoc(command_class) or "").partition("\n")[0].rstrip(".")


def paths_of(command: Any) -> set[str]:
    """Return the local paths and URIs among the options of a command."""
    fields = settings.record_fields(type(command)).items()
    values = [getattr(command, name) for name, field in fields if settings.is_path(field)]
    return {path for value in values for path in (value if isinstance(value, tuple) else (value,)) if path}
