"""The NCCL engine over stub libraries, in one command on a machine without a GPU:

    python -m tests.tools.nccl_stubs [--ranks 2]

where gcc, the CUDA 13 headers, an MPI and nccl4py are (``pip install '.[test,nccl]'``). The real nccl4py, cuda.core and
CUDA provider of onnxruntime work with a driver and an NCCL that this program builds: memory of a device is the host's,
NCCL's calls are carried out between the processes, a stream and an event are names, and no kernel computes. So
``tests.tools.nccl_run --only calls`` passes there as on devices, and shows that calls, buffers and operators are taken as
they are meant; ``--only training`` goes on to the first loss, which is none.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.tools import cuda_placement

DRIVER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
static int zero(void){return 0;}
static char context[16];
static __thread void*current=0;
int cuDriverGetVersion(int*v){*v=13000;return 0;}
int cuDeviceGetCount(int*n){*n=1;return 0;}
int cuDeviceGet(int*d,int i){*d=i;return 0;}
int cuDeviceGetAttribute(int*v,int a,int d){*v=a==75?9:a==76?0:1;return 0;}
int cuDevicePrimaryCtxRetain(void**c,int d){*c=context;return 0;}
int cuCtxSetCurrent(void*c){current=c;return 0;}
int cuCtxGetCurrent(void**c){*c=current;return 0;}
int cuCtxPushCurrent_v2(void*c){current=c;return 0;}
int cuCtxPopCurrent_v2(void**c){*c=current;return 0;}
int cuCtxGetDevice(int*d){*d=0;return 0;}
int cuStreamCreateWithPriority(void**s,unsigned f,int p){*s=malloc(8);return 0;}
int cuStreamGetCtx(void*s,void**c){*c=context;return 0;}
int cuEventCreate(void**e,unsigned f){*e=malloc(8);return 0;}
int cuGetErrorName(int e,const char**s){*s="stub";return 0;}
int cuGetErrorString(int e,const char**s){*s="stub";return 0;}
int cuGetProcAddress_v2(const char*name,void**p,int v,uint64_t f,int*status){
 static void*self=0;char second[200];snprintf(second,200,"%s_v2",name);
 if(!self)self=dlopen("libcuda.so.1",RTLD_NOLOAD|RTLD_NOW);
 *p=self?dlsym(self,name):0;if(self&&!*p)*p=dlsym(self,second);if(!*p)*p=zero;
 if(status)*status=0;return 0;}
"""
#: Each rank has a slot in memory that all share, in which it lays what it gives; barriers stand before and after.
NCCL = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#define SLOT (1ul<<28)
#define RANKS 8
typedef struct{char b[128];}Id;
typedef struct{pthread_barrier_t barrier;volatile int ready;long at[RANKS][RANKS];}Head;
typedef struct{Head*h;char*base;int n,r,operators;double scale[64];}Comm;
typedef struct{int kind;const void*s;void*d;size_t n;int t,op,root;Comm*c;}Call;
enum{ALL_REDUCE,REDUCE_SCATTER,REDUCE,ALL_GATHER,BROADCAST,SEND,RECV};
static __thread Call calls[256];static __thread int depth=0,count=0;
int ncclGetVersion(int*v){*v=22800;return 0;}
const char*ncclGetErrorString(int e){return "stub";}
const char*ncclGetLastError(void*c){return "";}
int ncclGetUniqueId(Id*id){memset(id,0,128);snprintf(id->b,100,"/nccl_stub_%d",getpid());
 int fd=shm_open(id->b,O_CREAT|O_RDWR,0600);int e=ftruncate(fd,4096+SLOT*RANKS);close(fd);return e?2:0;}
int ncclCommInitRankScalable(Comm**out,int n,int rank,int ids,Id*id,void*config){
 int fd=shm_open(id->b,O_RDWR,0600);if(fd<0||n>RANKS)return 3;
 Comm*c=calloc(1,sizeof*c);char*p=mmap(0,4096+SLOT*RANKS,PROT_READ|PROT_WRITE,MAP_SHARED,fd,0);
 c->h=(Head*)p;c->base=p+4096;c->n=n;c->r=rank;c->operators=5;
 if(rank==0){pthread_barrierattr_t a;pthread_barrierattr_init(&a);pthread_barrierattr_setpshared(&a,1);
  pthread_barrier_init(&c->h->barrier,&a,n);__sync_synchronize();c->h->ready=1;}
 while(!c->h->ready)usleep(100);
 pthread_barrier_wait(&c->h->barrier);if(rank==0)shm_unlink(id->b);*out=c;return 0;}
int ncclCommDestroy(Comm*c){return 0;}
int ncclCommAbort(Comm*c){return 0;}
int ncclCommGetAsyncError(Comm*c,int*e){*e=0;return 0;}
int ncclCommCount(Comm*c,int*n){*n=c->n;return 0;}
int ncclCommUserRank(Comm*c,int*n){*n=c->r;return 0;}
int ncclCommCuDevice(Comm*c,int*d){*d=0;return 0;}
static const int width[]={1,1,4,4,8,8,2,4,8,2};
static double get(const void*p,int t){
 switch(t){case 0:return*(int8_t*)p;case 1:return*(uint8_t*)p;case 2:return*(int32_t*)p;case 3:return*(uint32_t*)p;
 case 4:return*(int64_t*)p;case 5:return*(uint64_t*)p;case 6:return*(_Float16*)p;case 7:return*(float*)p;
 case 8:return*(double*)p;}
 uint32_t u=(uint32_t)*(uint16_t*)p<<16;float f;memcpy(&f,&u,4);return f;}
static double rounded(double v,int t,void*p){
 switch(t){case 0:*(int8_t*)p=v;break;case 1:*(uint8_t*)p=v;break;case 2:*(int32_t*)p=v;break;
 case 3:*(uint32_t*)p=v;break;case 4:*(int64_t*)p=v;break;case 5:*(uint64_t*)p=v;break;
 case 6:*(_Float16*)p=(_Float16)v;break;case 7:*(float*)p=v;break;case 8:*(double*)p=v;break;
 default:{float f=v;uint32_t u;memcpy(&u,&f,4);u+=0x7fff+((u>>16)&1);*(uint16_t*)p=u>>16;}}
 return get(p,t);}
int ncclRedOpCreatePreMulSum(int*op,void*scalar,int t,int where,Comm*c){
 if(where!=1||c->operators>=64)return 4;*op=c->operators;c->scale[c->operators++]=get(scalar,t);return 0;}
int ncclRedOpDestroy(int op,Comm*c){return 0;}
static void add(Call*o,size_t from){char p[8];Comm*c=o->c;
 for(size_t i=0;i<o->n;i++){double total=0;
  for(int r=0;r<c->n;r++){double v=get(c->base+SLOT*r+(from+i)*width[o->t],o->t);
   if(o->op>=5)v=rounded(v*c->scale[o->op],o->t,p);
   total=r==0?v:o->op==2?(v>total?v:total):rounded(total+v,o->t,p);}
  rounded(total,o->t,(char*)o->d+i*width[o->t]);}}
static void run(Call*o){Comm*c=o->c;size_t bytes=o->n*width[o->t]*(o->kind==REDUCE_SCATTER?c->n:1);
 if(bytes>SLOT)abort();
 if(o->kind!=BROADCAST||c->r==o->root)memcpy(c->base+SLOT*c->r,o->s,bytes);
 pthread_barrier_wait(&c->h->barrier);
 if(o->kind==ALL_REDUCE||(o->kind==REDUCE&&c->r==o->root))add(o,0);
 if(o->kind==REDUCE_SCATTER)add(o,o->n*c->r);
 if(o->kind==ALL_GATHER)for(int r=0;r<c->n;r++)memcpy((char*)o->d+r*bytes,c->base+SLOT*r,bytes);
 if(o->kind==BROADCAST)memcpy(o->d,c->base+SLOT*o->root,bytes);
 pthread_barrier_wait(&c->h->barrier);}
static int call(Call o){if(depth)calls[count++]=o;else run(&o);return 0;}
int ncclGroupStart(void){depth++;return 0;}
int ncclGroupEnd(void){if(--depth)return 0;
 int exchange=0;for(int i=0;i<count;i++)exchange|=calls[i].kind>=SEND;
 if(!exchange)for(int i=0;i<count;i++)run(&calls[i]);
 else{Comm*c=calls[0].c;long at=0;
  for(int i=0;i<count;i++)if(calls[i].kind==SEND){size_t bytes=calls[i].n*width[calls[i].t];
   memcpy(c->base+SLOT*c->r+at,calls[i].s,bytes);c->h->at[c->r][calls[i].root]=at;at+=bytes;}
  pthread_barrier_wait(&c->h->barrier);
  for(int i=0;i<count;i++)if(calls[i].kind==RECV)
   memcpy(calls[i].d,c->base+SLOT*calls[i].root+c->h->at[calls[i].root][c->r],calls[i].n*width[calls[i].t]);
  pthread_barrier_wait(&c->h->barrier);}
 count=0;return 0;}
#define TO const void*s,void*d,size_t n,int t
int ncclAllReduce(TO,int op,Comm*c,void*st){return call((Call){ALL_REDUCE,s,d,n,t,op,0,c});}
int ncclReduceScatter(TO,int op,Comm*c,void*st){return call((Call){REDUCE_SCATTER,s,d,n,t,op,0,c});}
int ncclReduce(TO,int op,int root,Comm*c,void*st){return call((Call){REDUCE,s,d,n,t,op,root,c});}
int ncclAllGather(TO,Comm*c,void*st){return call((Call){ALL_GATHER,s,d,n,t,0,0,c});}
int ncclBroadcast(TO,int root,Comm*c,void*st){return call((Call){BROADCAST,s,d,n,t,0,root,c});}
int ncclSend(const void*s,size_t n,int t,int peer,Comm*c,void*st){return call((Call){SEND,s,0,n,t,0,peer,c});}
int ncclRecv(void*d,size_t n,int t,int peer,Comm*c,void*st){return call((Call){RECV,0,d,n,t,0,peer,c});}
"""


def build(folder: Path) -> None:
    """The stub libraries of the placement tool, with a driver and an NCCL that cuda.core and nccl4py can use."""
    cuda_placement.build_stubs(folder)
    asked = re.findall(r"^int (cu\w+)\(", (folder / "libcuda.so.1.c").read_text(), re.M)
    made = re.findall(r"^int (cu\w+)\(", DRIVER, re.M)
    rest = "".join(f"int {name}(){{return 0;}}\n" for name in asked if name not in made)
    for soname, source in (("libcuda.so.1", DRIVER + rest), ("libnccl.so.2", NCCL)):
        c_file, version = folder / f"{soname}.c", folder / f"{soname}.map"
        c_file.write_text(source)
        version.write_text(f"{soname} {{ global: *; }};\n")
        flags = ["-w", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{soname}", f"-Wl,--version-script,{version}"]
        subprocess.run(["gcc", *flags, "-o", folder / soname, c_file, "-ldl", "-lrt", "-lpthread"], check=True)


def run(folder: Path, ranks: int, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """``tests.tools.nccl_run`` with these arguments, on so many ranks."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]))
    command = ["mpiexec", "-n", str(ranks), sys.executable, "-m", "tests.tools.nccl_run", *arguments]
    environment = dict(os.environ, LD_LIBRARY_PATH=path, OMP_NUM_THREADS="1")
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    chosen, rest = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        done = run(Path(folder), chosen.ranks, rest or ["--only", "calls"])
    print(done.stdout + "".join(line for line in done.stderr.splitlines(True) if "plugin EP device" not in line))
    sys.exit(done.returncode)
