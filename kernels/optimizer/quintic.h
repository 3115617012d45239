// The constants of Newton-Schulz, for every back end.  README, "Muon".
#pragma once

namespace kestrel {

// a x + b x^3 + c x^5 of every singular value (Jordan).
inline constexpr float kQuinticA = 3.4445f, kQuinticB = -4.7750f, kQuinticC = 2.0315f;

// Beside the norm; small enough that clipped gradients of 1e-10 still come out orthogonal.
inline constexpr double kNormEps = 1e-30;

}  // namespace kestrel
