// The Kalman filter of SORT's descendants tracks centre, aspect or width, height, and their velocities. Diagonal noise
// makes the covariance 2x2 blocks, computed side by side; camera motion mixes x with y and width with height (`cross`).
#pragma once

#include <cmath>
#include <cstddef>

namespace torch_fastdet::core {

struct alignas(32) Lanes {
  double lane[4];
  double operator[](int i) const { return lane[i]; }
  double& operator[](int i) { return lane[i]; }
};

inline Lanes operator+(const Lanes& a, const Lanes& b) {
  return {{a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]}};
}
inline Lanes operator-(const Lanes& a, const Lanes& b) {
  return {{a[0] - b[0], a[1] - b[1], a[2] - b[2], a[3] - b[3]}};
}
inline Lanes operator*(const Lanes& a, const Lanes& b) {
  return {{a[0] * b[0], a[1] * b[1], a[2] * b[2], a[3] * b[3]}};
}
inline Lanes operator/(const Lanes& a, const Lanes& b) {
  return {{a[0] / b[0], a[1] / b[1], a[2] / b[2], a[3] / b[3]}};
}
// Exchange the coordinates that camera motion mixes: x with y, and width with height.
inline Lanes swap(const Lanes& a) {
  return {{a[1], a[0], a[3], a[2]}};
}

// Hold covariances of (position, velocity) with itself. pv and vp may differ in the last bit, as in NumPy.
struct Covariance {
  Lanes pp, pv, vp, vv;
};

struct StillState {  // enough as long as the camera does not move
  Lanes position, velocity;
  Covariance own;  // of each coordinate with itself
};
struct KalmanState : StillState {
  Covariance cross;  // of each coordinate with its swap() partner; zero until the camera moves
};

inline void prefetch(const StillState* state) {
  for (size_t at = 0; at < sizeof(StillState); at += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(state) + at, 1);
}

struct CameraMotion {
  double rotation[2][2];
  double translation[2];
  double scale, angle;  // how the rotation changes rotated boxes: factor of their sides, and angle to add
};

// Operations follow NumPy's order, so that results are bitwise equal; compile this with -ffp-contract=off.
class KalmanFilter {
 public:
  // xywh estimates width and height, noise relative to each; else width / height and height, noise relative to height.
  explicit KalmanFilter(bool xywh) : xywh_(xywh) {}
  bool xywh() const { return xywh_; }

  void start(KalmanState& state, const Lanes& measured) const {
    state = KalmanState{};
    state.position = measured;
    const Lanes position = noise(state, 2 * kPosition, 1e-2), velocity = noise(state, 10 * kVelocity, 1e-5);
    state.own.pp = position * position;
    state.own.vv = velocity * velocity;
  }

  // mixed: the camera has moved before, so state.cross counts. single: round as NumPy's product for a single track.
  void predict(KalmanState& state, bool mixed, bool single = false) const {
    const Lanes position = noise(state, kPosition, 1e-2), velocity = noise(state, kVelocity, 1e-5);
    state.position = state.position + state.velocity;
    step(state.own, single);
    state.own.pp = state.own.pp + position * position;
    state.own.vv = state.own.vv + velocity * velocity;
    if (mixed) step(state.cross, single);
  }

  void correct(KalmanState& state, const Lanes& measured, bool mixed, double doubt = 1) const {
    const Lanes deviation = noise(state, kPosition, 1e-1);
    const Lanes innovation = measured - state.position;
    Covariance& own = state.own;
    const Lanes total = own.pp + deviation * deviation * Lanes{{doubt, doubt, doubt, doubt}};
    if (mixed) return correct_pairs(state, innovation, total);
    const Lanes inverse = Lanes{{1, 1, 1, 1}} / total;
    const Lanes gain_p = own.pp * inverse, gain_v = own.vp * inverse;
    const Lanes back_p = total * gain_p, back_v = total * gain_v;
    state.position = state.position + innovation * gain_p;
    state.velocity = state.velocity + innovation * gain_v;
    own.pp = own.pp - gain_p * back_p;
    own.pv = own.pv - gain_p * back_v;
    own.vp = own.vp - gain_v * back_p;
    own.vv = own.vv - gain_v * back_v;
  }

  // Move positions and rotate velocities. Sizes become those of the rotated box's bounds, or are only `scaled`.
  static void move(KalmanState& state, const CameraMotion& motion, bool scaled) {
    const auto& r = motion.rotation;
    auto size = [&](double value, double scale) { return scaled ? scale : std::abs(value); };
    const Lanes d = {{r[0][0], r[1][1], size(r[0][0], motion.scale), size(r[1][1], motion.scale)}};
    const Lanes o = {{r[0][1], r[1][0], size(r[0][1], 0), size(r[1][0], 0)}};
    state.position = d * state.position + o * swap(state.position);
    state.velocity = d * state.velocity + o * swap(state.velocity);
    state.position[0] += motion.translation[0];
    state.position[1] += motion.translation[1];
    for (Lanes Covariance::*part : {&Covariance::pp, &Covariance::pv, &Covariance::vp, &Covariance::vv}) {
      // Multiply rows, then columns: own is (i, i) and cross is (i, swap(i)) of R * C * R'.
      const Lanes own = d * (state.own.*part) + o * swap(state.cross.*part);
      const Lanes cross = d * (state.cross.*part) + o * swap(state.own.*part);
      state.own.*part = own * d + cross * o;
      state.cross.*part = own * swap(o) + cross * swap(d);
    }
  }

 private:
  static constexpr double kPosition = 1.0 / 20, kVelocity = 1.0 / 160;
  bool xywh_;

  Lanes noise(const KalmanState& state, double factor, double aspect) const {
    const double w = factor * state.position[2], h = factor * state.position[3];
    return xywh_ ? Lanes{{w, h, w, h}} : Lanes{{h, h, aspect, h}};
  }

  static void step(Covariance& c, bool single) {
    const Lanes pv = c.pv + c.vv, vp = c.vp + c.vv;
    c.pp = single ? (c.pp + c.pv) + vp : (c.pp + c.vp) + pv;
    c.pv = pv, c.vp = vp;
  }

  // Correct each coordinate of a pair by its own and its partner's innovation, with 2x2 matrices.
  static void correct_pairs(KalmanState& state, const Lanes& innovation, const Lanes& total) {
    Covariance &own = state.own, &cross = state.cross;
    const Lanes other = swap(total), mixed = cross.pp, mixed_back = swap(cross.pp);
    const Lanes determinant = total * other - mixed * mixed_back, away = swap(innovation);
    struct Gain {
      Lanes own, cross;
    };
    auto gain = [&](const Lanes& o, const Lanes& c) {
      return Gain{(o * other - c * mixed_back) / determinant, (c * total - o * mixed) / determinant};
    };
    const Gain p = gain(own.pp, cross.pp), v = gain(own.vp, cross.vp);
    state.position = state.position + (p.own * innovation + p.cross * away);
    state.velocity = state.velocity + (v.own * innovation + v.cross * away);
    auto shrink = [&](Lanes& o, Lanes& c, const Gain& row, const Gain& column) {  // C -= K * S * K'
      const Lanes a = row.own * total + row.cross * mixed_back, b = row.own * mixed + row.cross * other;
      o = o - (a * column.own + b * column.cross);
      c = c - (a * swap(column.cross) + b * swap(column.own));
    };
    shrink(own.pp, cross.pp, p, p);
    shrink(own.pv, cross.pv, p, v);
    shrink(own.vp, cross.vp, v, p);
    shrink(own.vv, cross.vv, v, v);
  }
};

}  // namespace torch_fastdet::core
