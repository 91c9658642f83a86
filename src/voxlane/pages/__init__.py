"""HTML pages from templates: one frame, style and set of charts, each page a single file that needs no network.

To add a page, write a template in `templates/` that extends the frame, and call `render` with its values, as
`voxlane.train.report` does.
"""
