#!/usr/bin/env python3
"""Where would onnxruntime-gpu place each node of a model on CUDA? Answered on a machine without a GPU.

The wheel's real CUDA provider is loaded over stub CUDA libraries that this script builds (gcc and
the CUDA headers are needed, no driver and no GPU). Kernel registry, partitioning, graph
optimisation and kernel constructors are the real ones; no kernel ever computes, so this says
nothing of values or speed.

    cuda_placement.py MODEL.onnx [--cuda-graph] [--json]
    cuda_placement.py --serve

Exit status 0: every node that computes lands on CUDA (and, with --cuda-graph, the step can be
captured); 1: some node does not, each one named; 2: the model could not be loaded. With --serve it takes such arguments
from standard input, a JSON list a line, and answers each with a line: a JSON list of status and words.
"""

import argparse
import collections
import contextlib
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile

# Where CUDA_STUB_LOG names a file, the libraries append to it what is asked of CUDA: copies, and graphs.
CUDART_SPECIAL = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "driver_types.h"
int cudaGetDeviceCount(int*n){*n=1;return 0;}
int cudaGetDevice(int*n){*n=0;return 0;}
int cudaDriverGetVersion(int*n){*n=13000;return 0;}
int cudaRuntimeGetVersion(int*n){*n=13000;return 0;}
int cudaDeviceGetAttribute(int*v,int a,int d){*v=(a==75)?9:(a==76)?0:1024;return 0;}
int cudaGetDeviceProperties(struct cudaDeviceProp*p,int d){memset(p,0,sizeof(*p));strcpy(p->name,"stub");
 p->major=9;p->minor=0;p->multiProcessorCount=132;p->warpSize=32;p->maxThreadsPerBlock=1024;
 p->totalGlobalMem=1ull<<36;p->sharedMemPerBlock=49152;p->sharedMemPerBlockOptin=232448;
 p->sharedMemPerMultiprocessor=233472;p->maxThreadsPerMultiProcessor=2048;return 0;}
int cudaMemGetInfo(size_t*f,size_t*t){*f=1ull<<35;*t=1ull<<36;return 0;}
static int take(void**p,size_t n){*p=aligned_alloc(256,(n+255)/256*256+256);return *p?0:2;}
int cudaMalloc(void**p,size_t n){return take(p,n);}
int cudaHostAlloc(void**p,size_t n,unsigned f){return take(p,n);}
int cudaMallocHost(void**p,size_t n){return take(p,n);}
int cudaFree(void*p){free(p);return 0;}
int cudaFreeHost(void*p){free(p);return 0;}
static void note(const char*what,const void*at,size_t n){const char*path=getenv("CUDA_STUB_LOG");
 FILE*f=path?fopen(path,"a"):0;if(f){fprintf(f,"%s:%p:%zu\n",what,at,n);fclose(f);}}
static int copy(const char*what,void*d,const void*s,size_t n,int k){note(k==1?"upload":k==2?"download":what,k==2?s:d,n);
 memcpy(d,s,n);return 0;}
int cudaMemcpy(void*d,const void*s,size_t n,int k){return copy("copy",d,s,n,k);}
int cudaMemcpyAsync(void*d,const void*s,size_t n,int k,void*st){return copy("copy_in_step",d,s,n,k);}
int cudaStreamBeginCapture(void*s,int m){note("record",0,0);return 0;}
int cudaStreamEndCapture(void*s,void**g){*g=malloc(8);return 0;}
int cudaGraphInstantiate(void**e,void*g,void*a,void*b,size_t c){*e=malloc(8);return 0;}
int cudaGraphLaunch(void*e,void*s){note("launch",e,0);return 0;}
int cudaStreamSynchronize(void*s){note("wait",0,0);return 0;}
const char*cudaGetErrorName(int e){return "stub";}
const char*cudaGetErrorString(int e){return "stub";}
void**__cudaRegisterFatBinary(void*x){static void*h[4];return h;}
int cudaStreamCreate(void**s){*s=malloc(8);return 0;}
int cudaStreamCreateWithFlags(void**s,unsigned f){*s=malloc(8);return 0;}
int cudaEventCreate(void**s){*s=malloc(8);return 0;}
int cudaEventCreateWithFlags(void**s,unsigned f){*s=malloc(8);return 0;}
int cudaPointerGetAttributes(struct cudaPointerAttributes*a,const void*p){memset(a,0,sizeof(*a));return 0;}
"""
CUBLAS_SPECIAL = r"""
static char handle[64];
int cublasCreate_v2(void**p){*p=handle;return 0;}
const char*cublasGetStatusName(int e){return "stub";}
const char*cublasGetStatusString(int e){return "stub";}
"""
CUBLASLT_SPECIAL = "static char handle[64];\nint cublasLtCreate(void**p){*p=handle;return 0;}\n"
NVINFER = r"""
static void*vt[512];static void*r[512];static int init=0;static void*f0(void){return 0;}
static void*obj(void){if(!init){for(int i=0;i<512;i++){vt[i]=(void*)f0;r[i]=(void*)r;}r[0]=vt;init=1;}return r;}
void*createInferBuilder_INTERNAL(){return obj();}void*createInferRefitter_INTERNAL(){return obj();}
void*createInferRuntime_INTERNAL(){return obj();}void*getPluginRegistry(){return obj();}
int getInferLibVersion(){return 101400;}
"""
NVPARSER = (
    "static char r[64];void*createNvOnnxParserRefitter_INTERNAL(){return r;}"
    "void*createNvOnnxParser_INTERNAL(){return r;}"
)


def provider_library():
    import importlib.util

    root = pathlib.Path(importlib.util.find_spec("onnxruntime").origin).parent
    return root / "capi" / "libonnxruntime_providers_cuda.so"


def build_stubs(folder):
    """One stub library per CUDA library that the provider names, every symbol it asks for in it."""
    provider = provider_library()
    undefined = subprocess.run(["nm", "-D", "--undefined-only", provider], capture_output=True, text=True, check=True)
    symbols = {line.split()[-1].split("@")[0] for line in undefined.stdout.splitlines()}

    def taken(source):
        return {s for s in symbols if f" {s}(" in source or f"*{s}(" in source}

    include = next(
        (
            p
            for p in ("/usr/local/cuda/include", "/usr/local/cuda-13.0/include")
            if os.path.exists(p + "/driver_types.h")
        ),
        None,
    )
    if include is None:
        sys.exit("cuda_placement: driver_types.h not found; the CUDA 13 headers are needed")
    rows = [
        ("libcudart.so.13", CUDART_SPECIAL, lambda s: s.startswith(("cuda", "__cuda"))),
        ("libcublas.so.13", CUBLAS_SPECIAL, lambda s: s.startswith("cublas") and not s.startswith("cublasLt")),
        ("libcublasLt.so.13", CUBLASLT_SPECIAL, lambda s: s.startswith("cublasLt")),
        ("libcurand.so.10", "", lambda s: s.startswith("curand")),
        ("libcuda.so.1", "", lambda s: s.startswith("cu") and not s.startswith(("cuda", "cublas", "curand"))),
        ("libnvinfer.so.10", NVINFER, lambda s: False),
        ("libnvonnxparser.so.10", NVPARSER, lambda s: False),
    ]
    for soname, special, mine in rows:
        done = taken(special)
        source = special + "".join(f"int {s}(){{return 0;}}\n" for s in sorted(symbols) if mine(s) and s not in done)
        compile_stub(folder, soname, source, ["-I", include])


def compile_stub(folder, soname, source, options=()):
    """A library whose symbols carry its name as their version, as those of CUDA do."""
    c_file, version = folder / (soname + ".c"), folder / (soname + ".map")
    c_file.write_text(source)
    version.write_text(f"{soname} {{ global: *; }};\n")
    flags = ["-w", "-shared", "-fPIC", *options, f"-Wl,-soname,{soname}", f"-Wl,--version-script,{version}"]
    subprocess.run(["gcc", *flags, "-o", folder / soname, c_file], check=True)


def over_stubs(folder):
    """The environment in which the provider finds the stub libraries of a folder."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")]))
    return dict(os.environ, CUDA_PLACEMENT_STUBS=str(folder), LD_LIBRARY_PATH=path)


def placement(path, cuda_graph):
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    saved = tempfile.mktemp(suffix=".onnx")
    options.optimized_model_filepath = saved
    cuda = {"enable_cudnn": "0"}
    if cuda_graph:
        cuda["enable_cuda_graph"] = "1"
    session = ort.InferenceSession(path, options, providers=[("CUDAExecutionProvider", cuda), "CPUExecutionProvider"])
    if "CUDAExecutionProvider" not in session.get_providers():
        raise RuntimeError("the CUDA provider did not load over the stubs")
    where = collections.defaultdict(list)
    for part in session.get_provider_graph_assignment_info():
        where[part.ep_name].extend((n.op_type, n.name) for n in part.get_nodes())
    import onnx

    copies = [
        n.op_type for n in onnx.load(saved, load_external_data=False).graph.node if n.op_type.startswith("Memcpy")
    ]
    os.unlink(saved)
    return where, copies


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument(
        "--cuda-graph", action="store_true", help="also ask whether the step can be captured as a CUDA graph"
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    try:
        where, copies = placement(args.model, args.cuda_graph)
    except Exception as error:  # onnxruntime raises its own family of errors here
        print(f"not loaded: {str(error)[:600]}")
        return 2
    cpu = where.get("CPUExecutionProvider", [])
    if args.json:
        print(json.dumps({"cuda": where.get("CUDAExecutionProvider", []), "cpu": cpu, "memcpy": copies}))
    else:
        for kind, count in sorted(collections.Counter(op for op, _ in cpu).items()):
            print(f"on CPU: {kind} x{count}: " + ", ".join(name for op, name in cpu if op == kind)[:160])
        print(f"{len(where.get('CUDAExecutionProvider', []))} nodes on CUDA, {len(cpu)} on CPU, {len(copies)} copies")
    return 1 if cpu or copies else 0


def serve():
    for line in sys.stdin:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            status = main(json.loads(line))
        print(json.dumps([status, said.getvalue()]), flush=True)
    return 0


if __name__ == "__main__":
    if os.environ.get("CUDA_PLACEMENT_STUBS") is None:
        with tempfile.TemporaryDirectory() as stubs:
            build_stubs(pathlib.Path(stubs))
            sys.exit(subprocess.run([sys.executable, *sys.argv], env=over_stubs(stubs)).returncode)
    sys.exit(serve() if sys.argv[1:] == ["--serve"] else main(sys.argv[1:]))
