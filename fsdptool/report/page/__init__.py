"""Pages and pictures: HTML and SVG in one file each, without scripts or requests."""
