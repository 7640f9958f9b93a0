#!/usr/bin/env python3
"""Makes the text that the small model learns from and is measured on: free manuals out of Debian packages.

    python3 scripts/small_model/make_corpus.py results/small_model/corpus

Downloads the packages with `apt-get download` (a Debian system with a package index; nothing is installed, no rights
are needed), takes their text files out and joins chapters to whole books:

    FOLDER/train/linux-networking.txt ...         what is trained on
    FOLDER/held_out/linux-filesystems.txt ...     other books, one of another package, that are only measured on
    FOLDER/SOURCES.md                             which book is from which package, version and licence, sizes, SHA-256
    FOLDER/packages/*.deb                         the packages as downloaded; those that are there are not fetched again

The same packages give the same bytes. Debian's archive moves on: SOURCES.md says which versions it were.
"""

import argparse
import collections
import gzip
import hashlib
import io
import pathlib
import subprocess
import sys
import tarfile

import plain_text

# Never trained on. Whole books of packages that are trained on, and one package of which nothing is. Those of
# 1,048,576 bytes and more measure what becomes of a model at eight times the length that it was trained at.
HELD_OUT = {"linux-filesystems", "linux-userspace-api", "linux-virt", "linux-sound", "python-howto",
            "vim-reference-manual", "vim-user-manual"}


def linux(files, root):
    """Every directory of the kernel's Documentation is a book; loose files are one more."""
    left_out = {"translations", "devicetree", "images"}  # other languages; tables of device bindings
    for path, content in files_below(files, root + "Documentation/", (".rst", ".txt")):
        folder = path.split("/")[0] if "/" in path else "overview"
        if folder not in left_out:
            yield f"linux-{folder}", content


def python(files, root):
    del root
    for path, content in files_below(files, "usr/share/doc/python3.11/html/_sources/", (".rst.txt",)):
        if "/" in path:
            yield f"python-{path.split('/')[0]}", content


def git(files, root):
    for path, content in files_below(files, root, (".txt",)):
        folder = path.split("/")[0] if "/" in path else "commands"
        yield f"git-{folder}", content


def perl(files, root):
    del root
    left_out = {"perltoc.pod", "perluniprops.pod"}  # the other pages' headings; tables
    for path, content in files_below(files, "usr/share/perl/5.36.0/pod/", (".pod",)):
        if path not in left_out:
            yield "perl-history" if path.endswith("delta.pod") else "perl-manual", content


def postgresql(files, root):
    page, seen = "index.html", set()
    while page and page not in seen:
        seen.add(page)
        html = plain_text.decoded(files[f"{root}html/{page}"])
        text, page = plain_text.from_html(html, {"navheader", "navfooter"})
        yield "postgresql-manual", text


def vim(files, root):
    del root
    for path, content in files_below(files, "usr/share/vim/vim90/doc/", (".txt",)):
        if not path.startswith(("version", "todo")):
            yield "vim-user-manual" if path.startswith("usr_") else "vim-reference-manual", content


# Package, the licence of its text (its copyright file says it in full), and how books are made of its files.
SOURCES = [
    ("linux-doc-6.1", "GPL-2", linux),
    ("python3.11-doc", "PSF-2 (Python licence)", python),
    ("git-doc", "GPL-2", git),
    ("perl-doc", "GPL-1+ or Artistic", perl),
    ("postgresql-doc-15", "PostgreSQL", postgresql),
    ("vim-runtime", "OPL-1+, no options exercised", vim),
]


def files_below(files, root, endings):
    """(path below root, text) of text files, an index first in its folder and chapters by name."""
    def order(path):
        folder, name = path.rsplit("/", 1) if "/" in path else ("", path)
        return folder, not name.startswith("index."), name

    for path in sorted((path.removeprefix(root) for path in files if path.startswith(root)), key=order):
        if path.removesuffix(".gz").endswith(endings):
            yield path, plain_text.decoded(files[root + path])


def package_file(package, folder):
    """The .deb of a package in `folder`, downloaded if it is not there."""
    there = sorted(folder.glob(f"{package}_*.deb"))
    if not there:
        done = subprocess.run(["apt-get", "download", "-qq", package], cwd=folder, capture_output=True, text=True,
                              check=False)
        there = sorted(folder.glob(f"{package}_*.deb"))
        if done.returncode != 0 or not there:
            sys.exit(f"make_corpus: {package} cannot be downloaded: {done.stderr.strip()}\n"
                     f"Debian 12 has it: run apt-get update, or put {package}_*.deb in {folder}")
    return there[-1]


def files_of(deb):
    """{path: content} of the regular files of a package, .gz ones unpacked."""
    archive = subprocess.run(["dpkg-deb", "--fsys-tarfile", deb], check=True, capture_output=True).stdout
    files = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            if member.isfile():
                content = tar.extractfile(member).read()
                path = member.name.removeprefix("./")
                files[path] = gzip.decompress(content) if path.endswith(".gz") else content
    return files


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    packages = folder / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    for part in ("train", "held_out"):
        (folder / part).mkdir(exist_ok=True)
        for old in (folder / part).glob("*.txt"):
            old.unlink()

    lines = ["| package | version | licence | book | bytes | used for | SHA-256 |", "|---|---|---|---|---|---|---|"]
    sums = collections.Counter()
    for package, licence, books_of in SOURCES:
        deb = package_file(package, packages)
        version = subprocess.run(["dpkg-deb", "--field", deb, "Version"], check=True, capture_output=True,
                                 text=True).stdout.strip()
        chapters = collections.defaultdict(list)
        for book, text in books_of(files_of(deb), f"usr/share/doc/{package}/"):
            chapters[book].append(text)
        for book in sorted(chapters):
            part = "held_out" if book in HELD_OUT else "train"
            content = "\n".join(chapters[book]).encode()
            (folder / part / f"{book}.txt").write_bytes(content)
            sums[part] += len(content)
            lines.append(f"| {package} | {version} | {licence} | {book} | {len(content)} | {part} | "
                         f"{hashlib.sha256(content).hexdigest()[:16]} |")
        print(f"make_corpus: {package} {version} ({licence}): {len(chapters)} books, "
              f"{sum(len(t.encode()) for texts in chapters.values() for t in texts):,} bytes")
    missing = HELD_OUT - {path.stem for path in (folder / "held_out").iterdir()}
    if missing:
        sys.exit(f"make_corpus: these books were not in their packages: {', '.join(sorted(missing))}")
    lines.append(f"\nTo train on {sums['train']} bytes; held out {sums['held_out']} bytes.")
    (folder / "SOURCES.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"make_corpus: {sums['train']:,} bytes to train on, {sums['held_out']:,} held out; {folder}/SOURCES.md lists "
          "them")


if __name__ == "__main__":
    main()
