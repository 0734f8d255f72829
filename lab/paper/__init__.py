"""The tables of the papers: `coppice bench paper NAME`."""
