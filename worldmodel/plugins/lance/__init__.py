"""The buffer of a flow in Lance datasets: `buffer: lance:FOLDER`."""
