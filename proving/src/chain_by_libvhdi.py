# Reads a whole chain with libvhdi. Arguments: where to put the bytes, then the files from the base to the top.
import sys
try:
    import pyvhdi
except ImportError:
    sys.exit(77)
files = []
for path in sys.argv[2:]:
    f = pyvhdi.file()
    f.open(path)
    if files:
        f.set_parent(files[-1])
    files.append(f)
top = files[-1]
with open(sys.argv[1], "wb") as out:
    left = top.get_media_size()
    while left:
        # A block at a time: in one read that spans blocks libvhdi 20210425 passes over a child's sectors.
        data = top.read_buffer(min(left, 256 << 10))
        if not data:
            sys.exit("short read")
        out.write(data)
        left -= len(data)
