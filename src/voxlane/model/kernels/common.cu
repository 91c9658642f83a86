// Common beginning of all sources of this package.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define STR2(x) #x
#define STR(x) STR2(x)

__device__ __forceinline__ u32 pack2(float low, float high) {
  u32 both;
  asm("cvt.rn." STR(T) "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
__device__ __forceinline__ float unpack(u32 both, int which) {
  u16 one = (u16)(which ? both >> 16 : both & 0xffff);
  float value;
  asm("cvt.f32." STR(T) " %0, %1;" : "=f"(value) : "h"(one));
  return value;
}

// Count, mean and squared distances of eight channels of some voxels, combined by Chan's formula.
struct Moments {
  float count, mean[8], squares[8];  // of distances from the mean

  __device__ __forceinline__ void join(float other_count, const float* other_mean, const float* other_squares) {
    float both = count + other_count, share = both > 0 ? other_count / both : 0;
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      float apart = other_mean[c] - mean[c];
      mean[c] += other_count > 0 ? apart * share : 0;
      squares[c] += other_squares[c] + (other_count > 0 && count > 0 ? apart * apart * count * share : 0);
    }
    count = both;
  }

  // Combine the eight lanes of a warp that have the same channels.
  __device__ __forceinline__ void join_lanes() {
#pragma unroll
    for (int apart = 4; apart < 32; apart *= 2) {
      float other_mean[8], other_squares[8], other_count = __shfl_xor_sync(0xffffffff, count, apart);
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        other_mean[c] = __shfl_xor_sync(0xffffffff, mean[c], apart);
        other_squares[c] = __shfl_xor_sync(0xffffffff, squares[c], apart);
      }
      join(other_count, other_mean, other_squares);
    }
  }
};

