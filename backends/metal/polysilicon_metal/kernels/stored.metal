// The float that an element of a plane stands for: a number of any dtype, or as uint8 a code of
// e4m3fn, which is none of its NaNs.

template <typename T>
inline float stored(T number) {
  return float(number);
}

inline float stored(uint8_t code) {
  const uint size = code & 0x7f;
  // A GPU may take float's subnormals for zeros, so e4m3's do not pass through them.
  const float magnitude =
      size < 8 ? float(size) * (1.0f / 512.0f) : as_type<float>((size << 20) + (120u << 23));
  return code & 0x80 ? -magnitude : magnitude;
}
