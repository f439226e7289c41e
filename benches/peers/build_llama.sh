#!/usr/bin/env bash
# Builds programs of llama.cpp for this processor: native kernels, weight repacking, OpenMP, Release.
#
#   build_llama.sh SOURCE_OR_SDIST OUT [TARGET...]
#
# SOURCE_OR_SDIST is a source folder of llama.cpp, or the llama-cpp-python sdist, which has one inside:
#   pip download --no-binary llama-cpp-python --no-deps llama-cpp-python==0.3.36
# OUT gets src/ (a patched copy; the source itself stays as it is), build/, and the programs asked for (llama-bench); llama-score
# is score.cpp.
# Needs cmake 3.14 and a C++17 compiler; both cmake and ninja can come from pip. JOBS, by default 2. EXAMPLES=ON for llama-lookup.
set -euo pipefail
if [ $# -lt 2 ]; then sed -n '2,11s/^# \{0,1\}//p' "$0" >&2; exit 2; fi
source=$1 out=$2
shift 2
targets=("${@:-llama-bench}")
command -v cmake >/dev/null || { echo "cmake is missing: pip install cmake ninja" >&2; exit 2; }
mkdir -p "$out"
out=$(cd "$out" && pwd)
here=$(cd "$(dirname "$0")" && pwd)

if [ ! -e "$out/src/CMakeLists.txt" ]; then
  rm -rf "$out/src" "$out/unpack"
  if [ -d "$source" ]; then
    [ -e "$source/vendor/llama.cpp/CMakeLists.txt" ] && source=$source/vendor/llama.cpp
    mkdir "$out/src"
    tar -C "$source" --exclude=.git --exclude='./build*' -cf - . | tar -C "$out/src" -xf -
  else
    mkdir "$out/unpack"
    tar -C "$out/unpack" -xf "$source"
    mv "$out"/unpack/*/vendor/llama.cpp "$out/src"
    rm -rf "$out/unpack"
  fi
fi
for needed in CMakeLists.txt tools/llama-bench/CMakeLists.txt src/llama-arch.cpp; do
  [ -e "$out/src/$needed" ] || { echo "$source: no $needed: not a whole source of llama.cpp" >&2; exit 2; }
done
grep -q '"gemma4"' "$out/src/src/llama-arch.cpp" || echo "warning: this source has no arch gemma4" >&2

# gcc 12 drops the stores to the tile configuration in front of its own ldtilecfg, whose operand names 8 of 64 bytes;
# every AMX product then ends in an illegal instruction. A barrier that knows the address keeps them.
amx=$out/src/ggml/src/ggml-cpu/amx/mmq.cpp
barrier='__asm__ volatile("" : : "r"(\&tc) : "memory");'
if [ -e "$amx" ] && ! grep -q '"r"(&tc)' "$amx"; then
  sed -i "s/^\( *\)_tile_loadconfig(&tc);/\1$barrier\n&/" "$amx"
fi

# llama-score is one more of its tools.
mkdir -p "$out/src/tools/score"
cp "$here/score.cpp" "$out/src/tools/score/"
cat >"$out/src/tools/score/CMakeLists.txt" <<'EOF'
add_executable(llama-score score.cpp)
target_link_libraries(llama-score PRIVATE llama ${CMAKE_THREAD_LIBS_INIT})
target_compile_features(llama-score PRIVATE cxx_std_17)
EOF
grep -q 'subdirectory(score)' "$out/src/tools/CMakeLists.txt" || echo 'add_subdirectory(score)' >>"$out/src/tools/CMakeLists.txt"

generator=()
command -v ninja >/dev/null && generator=(-G Ninja)
cmake -S "$out/src" -B "$out/build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release \
  -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON -DGGML_CPU_REPACK=ON -DGGML_OPENMP=ON -DGGML_LLAMAFILE=ON -DGGML_CCACHE=OFF \
  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=${EXAMPLES:-OFF} -DLLAMA_BUILD_SERVER=${SERVER:-OFF} -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_UI=OFF \
  -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TOOLS=ON
cmake --build "$out/build" --target "${targets[@]}" -j "${JOBS:-2}"
for target in "${targets[@]}"; do cp "$out/build/bin/$target" "$out/$target"; done
grep -E '^GGML_(NATIVE|OPENMP|CPU_REPACK|OPENMP_ENABLED)' "$out/build/CMakeCache.txt" || true
