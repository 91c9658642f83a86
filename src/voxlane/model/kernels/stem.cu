// The first 3 x 3 x 3 convolution of a network, from CHANNELS (1 to 4) channels to OUTPUTS (32), on tensor cores (sm_80).
//
// A block holds a brick of the input with a border of one voxel in shared memory, rounded to 16 bits. A voxel's 27
// neighbours in each channel are gathered as one row of a matrix product. Forward also computes the statistics of the
// output for an instance norm; the weights' gradient is summed over the brick.
//
// Compiled at run time, with T (a 16-bit type's PTX name), SOURCE (the input's type: float or u16), CHANNELS and BZ defined.

constexpr int BY = 8, BX = 32, WARPS = 8, THREADS = 32 * WARPS, OUTPUTS = 32;
constexpr int PZ = BZ + 2, PY = BY + 2, PX = BX + 2;
constexpr int TAPS = 27 * CHANNELS, STEPS = (TAPS + 15) / 16;
constexpr int TILES = BZ * BY * BX / 16;

__device__ __forceinline__ u16 rounded(float value) { return (u16)(pack2(value, 0.f) & 0xffff); }
__device__ __forceinline__ u16 rounded(u16 value) { return value; }

__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." STR(T) "." STR(T) ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
               "{%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

struct Place {
  int sample, z0, y0, x0;
};

// Load the brick. Voxels of the input are `voxel_stride` apart and channels `channel_stride`.
__device__ __forceinline__ Place load_brick(u16* brick, const SOURCE* in, int depth, int height, int width,
                                            int channel_stride, int voxel_stride, int chunks_z) {
  Place place{(int)blockIdx.z / chunks_z, (int)(blockIdx.z % chunks_z) * BZ, (int)blockIdx.y * BY, (int)blockIdx.x * BX};
  const SOURCE* own = in + (long long)place.sample * CHANNELS * depth * height * width;
  for (int i = threadIdx.x; i < CHANNELS * PZ * PY * PX; i += THREADS) {
    int x = place.x0 + i % PX - 1, y = place.y0 + i / PX % PY - 1, z = place.z0 + i / (PX * PY) % PZ - 1, c = i / (PX * PY * PZ);
    bool inside = x >= 0 && x < width && y >= 0 && y < height && z >= 0 && z < depth;
    brick[i] = inside ? rounded(own[(long long)c * channel_stride + (((long long)z * height + y) * width + x) * voxel_stride]) : (u16)0;
  }
  __syncthreads();
  return place;
}

__device__ __forceinline__ int tap_offset(int tap) {
  int c = tap / 27, dz = tap / 9 % 3, dy = tap / 3 % 3, dx = tap % 3;
  return ((c * PZ + dz) * PY + dy) * PX + dx;
}

// weights: [output][tap] of float32
extern "C" __global__ void __launch_bounds__(THREADS)
    stem_forward(const SOURCE* in, const float* weights, u16* out, float* partials, int depth, int height, int width,
            int channel_stride, int voxel_stride, int chunks_z) {
  extern __shared__ __align__(16) u16 brick[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4, row = lane / 4;
  Place place = load_brick(brick, in, depth, height, width, channel_stride, voxel_stride, chunks_z);

  // Column 8j + 2 quad + e of the product is output 8 quad + 2j + e: a thread's eight sums of a voxel are neighbours.
  u32 b[STEPS][4][2];
#pragma unroll
  for (int s = 0; s < STEPS; ++s)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int tap = 16 * s + 8 * h + 2 * quad, output = 8 * (row / 2) + 2 * j + row % 2;
        float low = tap < TAPS ? weights[output * TAPS + tap] : 0.f, high = tap + 1 < TAPS ? weights[output * TAPS + tap + 1] : 0.f;
        b[s][j][h] = pack2(low, high);
      }
  int offset[STEPS][2][2];  // -1: no tap; its value must be zero, even if memory holds NaN
#pragma unroll
  for (int s = 0; s < STEPS; ++s)
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        int tap = 16 * s + 8 * h + 2 * quad + e;
        offset[s][h][e] = tap < TAPS ? tap_offset(tap) : -1;
      }

  float pivot[8], sum[8], squares[8], count = 0;
  bool begun = false;
#pragma unroll
  for (int c = 0; c < 8; ++c) pivot[c] = sum[c] = squares[c] = 0;

  for (int tile = warp; tile < TILES; tile += WARPS) {
    int x = tile % (BX / 16) * 16, y = tile / (BX / 16) % BY, z = tile / (BX / 16 * BY);
    if (place.z0 + z >= depth) break;
    if (place.y0 + y >= height || place.x0 + x >= width) continue;
    const u16* base = brick + (z * PY + y) * PX + x + row;
    float d[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) d[j][i] = 0;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      u32 a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // voxel (+8 in the odd ones), taps (+8 in the upper two)
        int low = offset[s][i / 2][0], high = offset[s][i / 2][1];
        u32 one = 16 * s + 8 * (i / 2) + 6 < TAPS || low >= 0 ? base[low + 8 * (i % 2)] : 0;
        u32 two = 16 * s + 8 * (i / 2) + 7 < TAPS || high >= 0 ? base[high + 8 * (i % 2)] : 0;
        a[i] = one | two << 16;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) mma(d[j], a, b[s][j]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int column = place.x0 + x + row + 8 * half;
      if (column >= width) continue;
      u32 both[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) both[j] = pack2(d[j][2 * half], d[j][2 * half + 1]);
      long long voxel = (((long long)place.sample * depth + place.z0 + z) * height + place.y0 + y) * width + column;
      *reinterpret_cast<uint4*>(out + voxel * OUTPUTS + quad * 8) = make_uint4(both[0], both[1], both[2], both[3]);
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        float value = unpack(both[c / 2], c % 2);
        if (!begun) pivot[c] = value;
        float apart = value - pivot[c];
        sum[c] += apart, squares[c] += apart * apart;
      }
      begun = true, count += 1;
    }
  }

  Moments own;
  own.count = count;
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    float apart = count > 0 ? sum[c] / count : 0;
    own.mean[c] = pivot[c] + apart, own.squares[c] = squares[c] - apart * sum[c];
  }
  own.join_lanes();
  __syncthreads();
  float* board = reinterpret_cast<float*>(brick);  // [warp][quad][17]
  if (lane < 4) {
    float* mine = board + (warp * 4 + lane) * 17;
    mine[0] = own.count;
#pragma unroll
    for (int c = 0; c < 8; ++c) mine[1 + c] = own.mean[c], mine[9 + c] = own.squares[c];
  }
  __syncthreads();
  if (threadIdx.x < 4) {
    for (int other = 1; other < WARPS; ++other) {
      const float* theirs = board + (other * 4 + threadIdx.x) * 17;
      own.join(theirs[0], theirs + 1, theirs + 9);
    }
    int piece = (blockIdx.z % chunks_z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    float* to = partials + ((long long)place.sample * chunks_z * gridDim.y * gridDim.x + piece) * 96 + threadIdx.x * 8;
#pragma unroll
    for (int c = 0; c < 8; ++c) to[c] = own.count, to[32 + c] = own.mean[c], to[64 + c] = own.squares[c];
  }
}

// sums: [block][tap, padded to whole steps][output]
extern "C" __global__ void __launch_bounds__(THREADS)
    stem_weights(const SOURCE* in, const u16* gradient, float* sums, int depth, int height, int width, int channel_stride,
            int voxel_stride, int chunks_z) {
  extern __shared__ __align__(16) u16 brick[];
  constexpr int BRICK = (CHANNELS * PZ * PY * PX + 7) / 8 * 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4, row = lane / 4;
  u16* stage = brick + BRICK + warp * 16 * OUTPUTS;  // 16 voxels of the gradient
  Place place = load_brick(brick, in, depth, height, width, channel_stride, voxel_stride, chunks_z);
  int offset[STEPS][2];
#pragma unroll
  for (int s = 0; s < STEPS; ++s)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int tap = 16 * s + 8 * h + row;
      offset[s][h] = tap < TAPS ? tap_offset(tap) : -1;
    }
  float d[STEPS][4][4];
#pragma unroll
  for (int s = 0; s < STEPS; ++s)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) d[s][j][i] = 0;

  // A lane loads 16 bytes of two voxels; the order of chunks depends on the voxel, so that reads use different banks.
  u32 from_stage = (u32)__cvta_generic_to_shared(stage);
  uint4 ahead[2];
  auto fetch = [&](int tile) {
    int x = tile % (BX / 16) * 16, y = tile / (BX / 16) % BY, z = tile / (BX / 16 * BY);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int voxel = lane / 4 + 8 * half, column = place.x0 + x + voxel;
      bool inside = tile < TILES && place.z0 + z < depth && place.y0 + y < height && column < width;
      long long at = (((long long)place.sample * depth + place.z0 + z) * height + place.y0 + y) * width + column;
      ahead[half] = inside ? *reinterpret_cast<const uint4*>(gradient + at * OUTPUTS + (lane % 4) * 8) : make_uint4(0, 0, 0, 0);
    }
  };
  fetch(warp);
  for (int tile = warp; tile < TILES; tile += WARPS) {
    int x = tile % (BX / 16) * 16, y = tile / (BX / 16) % BY, z = tile / (BX / 16 * BY);
    if (place.z0 + z >= depth) break;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int voxel = lane / 4 + 8 * half;
      *reinterpret_cast<uint4*>(stage + voxel * OUTPUTS + ((lane % 4) ^ (voxel / 2 % 4)) * 8) = ahead[half];
    }
    __syncwarp();
    fetch(tile + WARPS);
    u32 b[4][2];
#pragma unroll
    for (int j = 0; j < 4; j += 2) {  // two chunks of 8 outputs, 16 voxels
      int voxel = lane % 8 + 8 * (lane / 8 % 2), chunk = j + lane / 16;
      u32 at = from_stage + (voxel * OUTPUTS + (chunk ^ (voxel / 2 % 4)) * 8) * 2;
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(b[j][0]), "=r"(b[j][1]), "=r"(b[j + 1][0]), "=r"(b[j + 1][1])
                   : "r"(at)
                   : "memory");
    }
    const u16* base = brick + (z * PY + y) * PX + x + 2 * quad;
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      u32 a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // taps (+8 in the odd ones), voxels (+8 in the upper two)
        int at = offset[s][i % 2];
        const u16* two = base + at + 8 * (i / 2);
        a[i] = at >= 0 ? (u32)two[0] | (u32)two[1] << 16 : 0;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) mma(d[s][j], a, b[j]);
    }
    __syncwarp();
  }

  __syncthreads();
  float* board = reinterpret_cast<float*>(brick);  // [tap][output]
  for (int turn = 0; turn < WARPS; ++turn) {
    if (warp == turn) {
#pragma unroll
      for (int s = 0; s < STEPS; ++s)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            int at = (16 * s + row + 8 * (i / 2)) * OUTPUTS + 8 * j + 2 * quad + i % 2;
            board[at] = d[s][j][i] + (turn ? board[at] : 0);
          }
    }
    __syncthreads();
  }
  long long block = ((long long)blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  for (int i = threadIdx.x; i < STEPS * 16 * OUTPUTS; i += THREADS) sums[block * STEPS * 16 * OUTPUTS + i] = board[i];
}
