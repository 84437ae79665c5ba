"""Runs cells as IPython does: dedents, magics, shell lines, displays and inline plots.

The plane of the daemon loads this file into a context whose guest has IPython, and calls `run` for each execution.
"""

import base64
import importlib.util
import json
import os
import sys
import types


def plain(data):
    """Media types with values that JSON can hold."""
    found = {}
    for media, value in data.items():
        if isinstance(value, bytes):
            value = base64.b64encode(value).decode()
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            value = str(value)
        found[media] = value
    return found


def load():
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.formatters import BaseFormatter
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets import ObjectName, Type, Unicode
    from traitlets.config import Config

    shown = []
    failures = []

    class Publisher(DisplayPublisher):
        def publish(self, data, metadata=None, **options):
            shown.append({"data": plain(data), "main": False})

        def clear_output(self, wait=False):
            pass

    class Hook(DisplayHook):
        def __call__(self, result=None):
            self.check_for_underscore()
            if result is None or self.quiet():
                return
            data, _ = self.compute_format_data(result)
            self.update_user_ns(result)
            self.fill_exec_result(result)
            if data:
                shown.append({"data": plain(data), "main": True})
                self.log_output(data)

    class Shell(InteractiveShell):
        displayhook_class = Type(Hook)
        display_pub_class = Type(Publisher)

        def enable_gui(self, gui=None):
            """Plots are pictures: no event loop of a window runs beside the cells."""

        def _showtraceback(self, etype, evalue, stb):
            failures.append({"name": etype.__name__, "message": str(evalue), "traceback": "\n".join(stb)})

    def table(value):
        """The columns of a data frame."""
        pandas = sys.modules.get("pandas")
        if pandas is None or not isinstance(value, pandas.DataFrame):
            return None
        columns = value.to_dict(orient="list")
        stamp = pandas.Timestamp
        return {
            str(name): [item.isoformat() if isinstance(item, stamp) else item for item in items]
            for name, items in columns.items()
        }

    def chart(value):
        """The data of a plot, if the guest has the package that extracts it."""
        figure = sys.modules.get("matplotlib.figure")
        if figure is None or not isinstance(value, figure.Figure):
            return None
        try:
            from e2b_charts import chart_figure_to_dict

            return chart_figure_to_dict(value)
        except Exception:
            return None

    def tree(value):
        if not isinstance(value, (list, dict)):
            method = getattr(value, "_repr_json_", None)
            return method() if callable(method) and not isinstance(value, type) else None
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            return None
        return value

    def form(media, function):
        class Form(BaseFormatter):
            format_type = Unicode(media)
            print_method = ObjectName("_repr_forkd_")
            _return_type = (dict, list, str)

            def __call__(self, value):
                try:
                    return function(value)
                except Exception:
                    return None

        return Form(parent=shell.display_formatter)

    config = Config()
    config.HistoryManager.enabled = False
    config.HistoryManager.hist_file = ":memory:"
    # Not imported here: that would load matplotlib with its own default. The agent and images set Agg, for code that
    # runs without IPython.
    inline = importlib.util.find_spec("matplotlib_inline") is not None
    if inline and os.environ.get("MPLBACKEND", "agg").lower() == "agg":
        os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    main = sys.modules["__main__"]
    module = types.ModuleType("__main__")
    # Modules that the image has warmed up stay in reach.
    space = {name: value for name, value in vars(main).items() if not name.startswith("_")}
    vars(module).update(space)
    shell = Shell.instance(config=config, user_module=module, user_ns=vars(module))
    sys.modules["__main__"] = module
    formatters = shell.display_formatter.formatters
    for media, function in [("e2b/data", table), ("e2b/chart", chart), ("application/json", tree)]:
        formatters[media] = form(media, function)
    if inline and "matplotlib" in sys.modules:
        shell.enable_matplotlib("inline")
    return shell, shown, failures


def show_saved_pictures():
    """A picture that is shown, or saved under a name, is a result. Done once PIL is loaded."""
    image = sys.modules.get("PIL.Image")
    if image is None or hasattr(image.Image, "_forkd_save"):
        return
    from IPython.display import display

    save = image.Image._forkd_save = image.Image.save

    def save_and_show(self, fp, format=None, **options):
        if isinstance(fp, str):
            display(self)
        return save(self, fp, format, **options)

    image.Image.save = save_and_show
    # The viewers of PIL would start a program for a screen.
    image.Image.show = lambda self, title=None: display(self)


def run(code, variables):
    """Runs one cell with additional environment variables, and describes what it has shown."""
    # One write for each line, so that a line arrives in one piece.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True, write_through=False)
    shown.clear()
    failures.clear()
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        show_saved_pictures()
        shell.run_cell(code, store_history=True)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
    error = failures[-1] if failures else None
    return {"results": list(shown), "error": error, "count": shell.execution_count - 1}


shell, shown, failures = load()
