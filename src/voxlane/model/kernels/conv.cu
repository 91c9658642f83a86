// 3 x 3 x 3 convolutions of few channels over large volumes, on the tensor cores of a Hopper GPU (sm_90a).
//
// A block of threads moves along z over a column of TY x TX voxels. Each input plane of it, with a border of one voxel, is
// loaded to shared memory once and used for all 27 taps. Shared memory holds a plane as [8 channels][voxel], 16 bytes
// each: in that layout, without swizzling, the tensor cores' descriptors may start at any voxel, so that a tap is just
// another start address.
//
// Forward: a plane's nine shifts (dy, dx) are multiplied with the weights of all three dz at once, into the sums of three
// output planes; after each plane the oldest one is complete and is written, and the others move up. The statistics of the
// output for an instance norm are computed on the way. Gradients of the input use the same kernel with other weights.
//
// Weights: for 32 x 32 channels and all 27 taps at once, sums stay in registers over all planes that a block sees;
// the output's gradient comes from registers, transposed, the input from shared memory.
//
// Compiled at run time, with T (a 16-bit type's PTX name), CIN, WGY, WGX, STAGES and MIN_BLOCKS defined, and
// either FORWARD, with or without STATISTICS, or WEIGHTS.

constexpr int WARPGROUPS = WGY * WGX;
constexpr int THREADS = 128 * WARPGROUPS;
constexpr int TY = 8 * WGY, TX = 8 * WGX;
constexpr int PY = TY + 2, PX = TX + 2;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy16(u32 to, const void* from, bool there) {
  int bytes = there ? 16 : 0;  // the rest of the 16 is filled with zeros
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
// Make this thread's writes to shared memory visible to the tensor cores; a barrier must follow.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void mma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void mma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void mma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

// A matrix in shared memory, of 8 x 16-byte pieces: `leading` and `stride` are bytes between pieces, along K and along
// rows (K-major), or along K and along columns (the other way round).
__device__ __forceinline__ u64 descriptor(u32 leading, u32 stride) {
  return ((u64)(leading >> 4) << 16) | ((u64)(stride >> 4) << 32);
}

#define F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)

// 64 voxels x 96 sums += 64 voxels x 16 channels * 16 channels x 96
__device__ __forceinline__ void mma_m64n96k16(float (&d)[48], u64 a, u64 b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n96k16.f32." STR(T) "." STR(T) " "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "
      "%46, %47}, %48, %49, p, 1, 1, 0, 0;\n}\n"
      : F16(0), F16(16), F16(32)
      : "l"(a), "l"(b));
}

// 64 x 32 sums += 64 x 16 (registers) * 16 x 32, the second with its 32 contiguous
__device__ __forceinline__ void mma_m64n32k16(float (&d)[16], const u32 (&a)[4], u64 b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." STR(T) "." STR(T) " "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, 1;\n}\n"
      : F16(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Layout and loading of a plane of 8 * CHUNKS channels. stride16 keeps a warp's writes on different banks.
template <int ROWS_Y, int ROWS_X, int CHUNKS> struct Plane {
  static constexpr int rows = ROWS_Y * ROWS_X;
  static constexpr int remainder16 = CHUNKS == 4 ? 2 : 1;  // chunk stride in 16 bytes, modulo 8
  static constexpr int stride16 = rows + (remainder16 - rows % 8 + 8) % 8;
  static constexpr int chunk_bytes = stride16 * 16;
  static constexpr int bytes = chunk_bytes * CHUNKS;
  static constexpr int pieces = rows * CHUNKS;
  static constexpr int each = (pieces + THREADS - 1) / THREADS;

  int from[each];  // element within the plane, -1: outside
  u32 to[each];

  __device__ __forceinline__ void aim(int y0, int x0, int height, int width, int voxel_stride) {
#pragma unroll
    for (int i = 0; i < each; ++i) {
      int piece = threadIdx.x + i * THREADS, row = piece / CHUNKS, chunk = piece % CHUNKS;
      int y = y0 + row / ROWS_X, x = x0 + row % ROWS_X;
      bool inside = y >= 0 && y < height && x >= 0 && x < width;
      from[i] = inside ? (y * width + x) * voxel_stride : -1;
      to[i] = (chunk * stride16 + row) * 16;
    }
  }

  // `source` points to this thread's first 8 channels of the volume.
  __device__ __forceinline__ void fetch(u32 shared, const u16* source, long long plane, bool there) const {
    const u16* start = source + plane;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      if (pieces % THREADS == 0 || threadIdx.x + i * THREADS < pieces) {
        bool inside = there && from[i] >= 0;
        copy16(shared + to[i], inside ? start + from[i] : source, inside);
      }
    }
  }
};

extern __shared__ __align__(1024) unsigned char shared_bytes[];

#ifdef FORWARD
constexpr int CHUNKS = CIN / 8;
constexpr int WEIGHT_BYTES = 9 * CHUNKS * 96 * 16;
typedef Plane<PY, PX, CHUNKS> Input;
static_assert(THREADS % CHUNKS == 0, "a thread copies one chunk of channels");

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS)
    conv_forward(const u16* first, const u16* second, const u16* weights, u16* out, float* partials, int depth, int height,
            int width, int in_stride, int out_stride, int planes_each, int chunks_z) {
  const u32 weight_base = shared_address(shared_bytes), plane_base = weight_base + WEIGHT_BYTES;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, group = warp / 4;
  const int sample = blockIdx.z / chunks_z, chunk_z = blockIdx.z % chunks_z;
  const int z0 = chunk_z * planes_each, z1 = min(z0 + planes_each, depth);
  const int y0 = blockIdx.y * TY, x0 = blockIdx.x * TX;
  const long long plane_elements = (long long)height * width * in_stride;

  const int chunk = tid % CHUNKS;
  const u16* source = (chunk < 4 ? first : second) + (chunk % 4) * 8;
  Input input;
  input.aim(y0 - 1, x0 - 1, height, width, in_stride);

  for (int i = tid; i < WEIGHT_BYTES / 16; i += THREADS) copy16(weight_base + i * 16, weights + i * 8, true);
#pragma unroll
  for (int i = 0; i < STAGES - 1; ++i) {
    int z = z0 - 1 + i;
    input.fetch(plane_base + i * Input::bytes, source, ((long long)sample * depth + z) * plane_elements, z >= 0 && z < depth);
    commit_copies();
  }

  float d[48];  // three output planes: started, half done, complete
#pragma unroll
  for (int i = 0; i < 48; ++i) d[i] = 0;

  // This thread's part of a plane: the voxel (y, x) and the one below, 8 channels of each.
  const int quad = lane % 4, in_tile_y = (group / WGX) * 8, in_tile_x = (group % WGX) * 8;
  const int y = y0 + in_tile_y + 2 * (warp % 4), x = x0 + in_tile_x + lane / 4;
  const bool upper = y < height && x < width, lower = y + 1 < height && x < width;
  u16* place = out + (((long long)sample * depth * height + y) * width + x) * out_stride + quad * 8;

  float pivot[8], sum[8], squares[8];
  int planes = 0;
#pragma unroll
  for (int c = 0; c < 8; ++c) pivot[c] = sum[c] = squares[c] = 0;

  const u64 a_kind = descriptor(Input::chunk_bytes, PX * 16), b_kind = descriptor(96 * 16, 128);
  const u32 a_start = plane_base + (in_tile_y * PX + in_tile_x) * 16;
  int stage = 0;
  for (int z = z0 - 1; z <= z1; ++z) {
    wait_copies<STAGES - 2>();
    publish();
    __syncthreads();
    {
      int next = z + STAGES - 1, into = stage == 0 ? STAGES - 1 : stage - 1;
      if (next <= z1)
        input.fetch(plane_base + into * Input::bytes, source, ((long long)sample * depth + next) * plane_elements, next < depth);
      commit_copies();
    }
    mma_fence();
#pragma unroll
    for (int tap = 0; tap < 9; ++tap) {
#pragma unroll
      for (int k = 0; k < CHUNKS / 2; ++k) {
        u32 a = a_start + stage * Input::bytes + ((tap / 3) * PX + tap % 3) * 16 + 2 * k * Input::chunk_bytes;
        u32 b = weight_base + (tap * CHUNKS + 2 * k) * 96 * 16;
        mma_m64n96k16(d, a_kind | (a >> 4), b_kind | (b >> 4));
      }
    }
    mma_commit();
    mma_wait<0>();
    stage = stage == STAGES - 1 ? 0 : stage + 1;

    if (z > z0) {  // plane z - 1 is complete
      u16* here = place + (long long)(z - 1) * height * width * out_stride;
      u32 both[2][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        both[0][j] = pack2(d[32 + 4 * j], d[32 + 4 * j + 1]);
        both[1][j] = pack2(d[32 + 4 * j + 2], d[32 + 4 * j + 3]);
      }
      if (upper) *reinterpret_cast<uint4*>(here) = make_uint4(both[0][0], both[0][1], both[0][2], both[0][3]);
      if (lower)
        *reinterpret_cast<uint4*>(here + (long long)width * out_stride) = make_uint4(both[1][0], both[1][1], both[1][2], both[1][3]);
#ifdef STATISTICS
      // Sums of distances from the first value, which avoid the cancellation of sums of distances from zero.
      if (planes == 0) {
#pragma unroll
        for (int c = 0; c < 8; ++c) pivot[c] = unpack(both[0][c / 2], c % 2);
      }
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        float one = unpack(both[0][c / 2], c % 2) - pivot[c], two = unpack(both[1][c / 2], c % 2) - pivot[c];
        if (upper) sum[c] += one, squares[c] += one * one;
        if (lower) sum[c] += two, squares[c] += two * two;
      }
#endif
      ++planes;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) d[32 + i] = d[16 + i], d[16 + i] = d[i], d[i] = 0;
  }

#ifdef STATISTICS
  wait_copies<0>();
  Moments own;
  own.count = (float)(planes * ((int)upper + (int)lower));
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    float apart = own.count > 0 ? sum[c] / own.count : 0;
    own.mean[c] = pivot[c] + apart;
    own.squares[c] = squares[c] - apart * sum[c];
  }
  own.join_lanes();
  float* board = reinterpret_cast<float*>(shared_bytes);  // [warp][quad][17]
  __syncthreads();
  if (lane < 4) {
    float* mine = board + (warp * 4 + lane) * 17;
    mine[0] = own.count;
#pragma unroll
    for (int c = 0; c < 8; ++c) mine[1 + c] = own.mean[c], mine[9 + c] = own.squares[c];
  }
  __syncthreads();
  if (tid < 4) {
    for (int other = 1; other < 4 * WARPGROUPS; ++other) {
      const float* theirs = board + (other * 4 + tid) * 17;
      own.join(theirs[0], theirs + 1, theirs + 9);
    }
    int piece = (chunk_z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    float* to = partials + ((long long)sample * chunks_z * gridDim.y * gridDim.x + piece) * 96 + tid * 8;
#pragma unroll
    for (int c = 0; c < 8; ++c) to[c] = own.count, to[32 + c] = own.mean[c], to[64 + c] = own.squares[c];
  }
#endif
}
#endif

#ifdef WEIGHTS
// Two warpgroups; tiles of 16 x 16 voxels. The first multiplies the gradient's planes z and z + 1 with the input's plane z
// (dz of 1 and 0), the second plane z - 1 (dz of 2), half of its rows idle: a warpgroup has 64 rows.
static_assert(WGY == 2 && WGX == 1, "two warpgroups");
constexpr int SIDE = 16;
typedef Plane<SIDE + 2, SIDE + 2, 4> Input;
typedef Plane<SIDE, SIDE, 4> Gradient;

__device__ __forceinline__ void load_transposed(u32 (&a)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
               : "r"(address)
               : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    conv_weights(const u16* in, const u16* gradient, float* sums, int depth, int height, int width, int in_stride,
            int gradient_stride, int tiles_y, int tiles_x, int planes_each, int chunks_z, int items) {
  const u32 in_base = shared_address(shared_bytes), gradient_base = in_base + 2 * Input::bytes;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, group = warp / 4;
  float d[9][16];
#pragma unroll
  for (int t = 0; t < 9; ++t)
#pragma unroll
    for (int i = 0; i < 16; ++i) d[t][i] = 0;

  const u16* in_source = in + (tid % 4) * 8;
  const u16* gradient_source = gradient + (tid % 4) * 8;
  const long long in_plane = (long long)height * width * in_stride;
  const long long gradient_plane = (long long)height * width * gradient_stride;
  // Address in the transposed 16 x 16 tile (16 channels, 16 voxels along x) that this warp holds of a row of voxels.
  const u32 a_lane = (((warp % 2) * 2 + (lane / 8) % 2) * Gradient::stride16 + (lane / 16) * 8 + lane % 8) * 16;
  const int a_plane = group == 0 ? (warp % 4) / 2 : -1;
  const u64 b_kind = descriptor(128, Input::chunk_bytes);

  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    int tile = item / chunks_z, z0 = (item % chunks_z) * planes_each, z1 = min(z0 + planes_each, depth);
    int sample = tile / (tiles_y * tiles_x), y0 = (tile / tiles_x % tiles_y) * SIDE, x0 = (tile % tiles_x) * SIDE;
    Input input;
    Gradient outer;
    input.aim(y0 - 1, x0 - 1, height, width, in_stride);
    outer.aim(y0, x0, height, width, gradient_stride);
    const long long first = (long long)sample * depth;

    __syncthreads();  // the last item's planes are done with
    for (int z = z0 - 1; z <= z0 + 1; ++z)
      outer.fetch(gradient_base + (z & 3) * Gradient::bytes, gradient_source, (first + z) * gradient_plane, z >= 0 && z < depth);
    input.fetch(in_base + (z0 & 1) * Input::bytes, in_source, (first + z0) * in_plane, true);
    commit_copies();

    for (int z = z0; z < z1; ++z) {
      wait_copies<0>();
      publish();
      __syncthreads();
      if (z + 1 < z1) {
        outer.fetch(gradient_base + ((z + 2) & 3) * Gradient::bytes, gradient_source, (first + z + 2) * gradient_plane, z + 2 < depth);
        input.fetch(in_base + ((z + 1) & 1) * Input::bytes, in_source, (first + z + 1) * in_plane, true);
      }
      commit_copies();

      const u32 a_start = gradient_base + ((z + a_plane) & 3) * Gradient::bytes + a_lane;
      const u32 b_start = in_base + (z & 1) * Input::bytes;
      u32 a[2][4][4];
#pragma unroll
      for (int batch = 0; batch < SIDE / 4; ++batch) {
        if (batch >= 2) mma_wait<1>();  // the registers of the batch before the last are free
#pragma unroll
        for (int k = 0; k < 4; ++k) load_transposed(a[batch % 2][k], a_start + (batch * 4 + k) * SIDE * 16);
        mma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
          for (int t = 0; t < 9; ++t) {
            u32 b = b_start + ((batch * 4 + k + t / 3) * (SIDE + 2) + t % 3) * 16;
            mma_m64n32k16(d[t], a[batch % 2][k], b_kind | (b >> 4));
          }
        }
        mma_commit();
      }
      mma_wait<0>();
    }
  }
  // [block][dz][tap][out channel][in channel]
  const int row = (warp % 4) * 16 + lane / 4, dz = group == 0 ? (warp % 4 < 2 ? 1 : 0) : 2;
  if (group == 0 || warp % 4 < 2) {
    float* to = sums + ((long long)blockIdx.x * 3 + dz) * 9 * 1024 + (row % 32) * 32 + (lane % 4) * 2;
#pragma unroll
    for (int t = 0; t < 9; ++t)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          *reinterpret_cast<float2*>(to + t * 1024 + half * 8 * 32 + j * 8) = make_float2(d[t][4 * j + 2 * half], d[t][4 * j + 2 * half + 1]);
  }
}
#endif
