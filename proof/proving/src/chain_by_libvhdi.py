# Reads a whole chain with libvhdi. Arguments: the output file, then the images from the base to
# the top.
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
        # One block at a time: libvhdi 20210425 drops a child's sectors in reads that span blocks.
        data = top.read_buffer(min(left, 256 << 10))
        if not data:
            sys.exit("short read")
        out.write(data)
        left -= len(data)
