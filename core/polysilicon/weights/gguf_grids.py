"""The grids of GGUF's IQ types: the points that their vectors of 8 or 4 elements may take.

The points are facts of the file format, chosen by llama.cpp's authors (`iq2xxs_grid` and its kin in
ggml-common.h, MIT licence; the same in the `gguf` package). A grid is a set of vectors of small
level numbers, and ggml numbers its points in the order of those vectors read as numbers whose
lowest digit comes first. So each is kept as a set: bit n of a bit map says that the vector with the
digits of n is a point.
"""

from __future__ import annotations

import base64
import dataclasses
import functools

import numpy as np
import numpy.typing as npt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """levels: how many an element has. length: elements of a vector. members: the bit map, lowest
    bit first, in base 85."""

    levels: int
    length: int
    members: str

    @functools.cached_property
    def points(self) -> npt.NDArray[np.uint8]:
        """uint8 `[points, length]`: level numbers by the point's number."""
        size = self.levels**self.length
        bits = np.frombuffer(base64.b85decode(self.members), np.uint8)
        numbers = np.flatnonzero(np.unpackbits(bits, count=size, bitorder="little"))
        return (numbers[:, None] // self.levels ** np.arange(self.length) % self.levels).astype(
            np.uint8
        )


IQ2_XXS = Grid(
    levels=3,
    length=8,
    members=(
        "RTUIf5JW*i00b0701yBG00ck)6aYW~00004002-BKtT}z0Tcv4Py|2#5C8xL5C8yB0003106+i$K@<c)6chj"
        "e1ONa8000C40000000a;K000000000K1P~AaKmY_000aRL06;(h0RR91000350000001yN~1V8`)1ONa401y"
        "BG01yBG06+i`00000000001pxpA002M$000pH000000000100000KmY&$000yO000310R;d60000G5C8xG00"
        "2+`0000000000KtTWi0YCr%002M$000C4KmY&$0000000000KmY(h00aO400004000000000000000000010"
        "000008kJ_K@boD6a)Ye06+i$00cw;06;(h06;(h0RR9%5C8!H000mG5C8xK5C8xG000000RR9100000000yO"
        "01yEH000001ONa401yEL00000000C4000C45JXS_000040RR92000C4000000RR9100000KmY&$00000002M"
        "%000310000000004000000RR9100a;O0000400000002M$00000000C40000000000K>z>&0003106+i$002"
        "M$0000006+i$01yBG000pH000000000002BZK00004000000000000000000000RR9100000000000000000"
        "00000000002Ni000C406+i$00ck)1ONa4000001ONa40000002D+35CA{`00004000040000G000C4KmY&%0"
        "000$00000000000003100000000000096100000000C55Ci}K0000106+i$002M$0000000031000001OPw)"
        "0RR910000000001000000000000000000000000001yBG000010000000000000000000000aO401yBG1ONa"
        "40RR910000000aO4000000000000aO400000000000000000000000000000000000000C4000001ONa4000"
        "0000000000000000000"
    ),
)

IQ2_XS = Grid(
    levels=3,
    length=8,
    members=(
        "RaI3{RYgG+MFCV*RZvAi5Cs7MR8bH>K?DE+0RT`{ML`u60TcuPP(?ui1px#E002Ni01yQL06+i$Kve}16a)b"
        "f06;(m0RRL506-7`009650RR9101yFGRZ&nyK|loo08~*BKtTWi0Z;%?5dc5{0096108m9i07U^11ONa)K>z"
        ">&0000006+i)00031000001qA>EKmY&)000pH000001ONa400000KmY&$003205I{iy00965P!Iq>5C9MW00"
        "0mG0096100aO4L_q*R0RR91002M$000CK0000G0096200000000m{0R#X50RRvH1ONa40000G009610T2KH0"
        "02Y*08mv$K~)726a)ZJML_@s0RTh*KtMqOKmh;%0000$6-5CQ1ON~K0RRO75Ci}K002M$0RaF&5C8xG000yO"
        "01yEI0RR911P}lKK>$Di002M$0000000000P(?uy1pxpA002Ni1ONp900000KmY&$5C8xG002M*0R#j95I_I"
        "`0YLx&0000$5C8xG01yBG01yBG1Oz|;KtKQh0003101!X{000000000000000KmY(hK>z>&5D)+X08jt`000"
        "0000000000mG1ONa40RRC&000000000000aOK0RR9101yBG00000000005C8xG000010000000aO40000000"
        "aO401yxW002N01pyTV08jt`P!$0H1P}xO0000100aO406+l%K@?N~5CA{`KmY&)0000100000KmY&)000000"
        "RR9H1ONm8009&L00aa80000000000000C4000mK1P}!Q00aO5009610RRvH00031000000000406+i$L;wH)"
        "K@b1{0000001yBG000yK000000RR910000000004000001ONa400961000005C8xG5C8xG07U@=1ONa40003"
        "10000$5C8xGKokK05C8xG0RRL5002M$0000$0000000000000000000006+i$1OPw)MF0Q*002M`1ONa4000"
        "050000000jU5000310R"
    ),
)

IQ2_S = Grid(
    levels=3,
    length=8,
    members=(
        "RaI3{RYg@51rb$MQBXxy6a^I&R8bI6RRjPL5fD&SMO9T*6;wr0P*qhFRaF#JQ4l~?1OQPK1W*tFKowOHRaH?"
        "C0Rcb-RRly)5I{fx009&b1rPuL06+j#RZ&qzRTULc6jW7JMO76ARTKbF6hT1*1ppKT08m9$6jfCeR8bH>RTT"
        "wQ6a-KZ06-K40TcuP5C8x`RZ#>~Q4l}@0031K1W*tF5C8xK5Ci}a00aO4002}`6;VM21OX8MR8T=c1qA^V1O"
        "N~a08s=1000F5L{$_8RTKnJ5CA|F1pyQU01*HH00jX61ONm80000H6aY{V002M$02KrP0000001yBG1V8`)0"
        "0ck*08mv`MO9T56hu)_MO6h=RTNZF5I{i{1W^<OPyhfxRaI3~RZ&nyK>$@%6jV_VP(c6yRTKnJ5CA{`01y;a"
        "QBXxe00aR5R8bH>K>z>&Kmbq>06+i$00000P(@W0RaF#JQ2;<y6$Mok1W*tFKokW56a)Yi00010RTNZF5I{i"
        "y096zOP!Iq>0000K1OO2L0000008~*BKtVtN0RR9{5CA{`0000001yBW00000KmY(lMHK~66a+vJ06-N50Tc"
        "uP5C9MW1OWg90096100B`H1W*tFKmY&$6a)Ye5C9MW1ONm800000000mGP!IqB000mG009sH06+i$0000000"
        "0001ONa406;($MG+KK5fDKE07X?4R8asxK>$Dz6#!5W0000008~{GP(?ui1pxq5Q4l~u0003208kJBPyhe`0"
        "000GK>+{-0RR91KtKTi0096%00000000C400lq*00Bi+5L8hRKtTWi5flJW5D)+W000yO01yBG0000$R8bH>"
        "K>z>&Kmbq>06+i$0000H5C8xG5C9MW002Ni01yEH00000Pyhe`01*HH0000000000002M$01*)oR1g3F000C"
        "5000mG00aO401yN~6aWAKL;(O%5CA{`00001Ko9^B0000000000000001ONa4002M$KmY&$0000100000KmY"
        "&)002M%6afGL01yBG0R"
    ),
)

IQ3_XXS = Grid(
    levels=8,
    length=4,
    members=(
        "6^aD{1ONai3I!qs0uTTJ6#@l{0D=G@f(0M|0000100;np5P$$Ef&c&n00aO40000W000mG08sz{2mk^A3Iz%"
        "kfB^si1p);C000003IzfI000041pom8Kmb4hA^-pY00961000pHKmY&&AOHXW00000000C40RR911qww11ON"
        "a4Dg^=o004*q1%d^D0U!VX0ucZJ0000H0000W00;m82mpWp0ssII00000000003P1n=AOHXW0tE^H00AHb1p"
        "om8Pyhe`3IQMh00aO800ICA0000000001fB*mlK>!2*03ZMW01yB`000O800008000315P$%n0Ehqp000000"
        "000G0004i0RTY&fB*mhAOHXW5C8xG00IyI001BW2mk;90000000000AO!#c0000000aO40ssI3K>$Di03ZMW"
        "01yBK000041ONa400;m800D>q000041ONa6000000000000961000mG1ONa4000mGPyi4B00062000620Du4"
        "h000mG0000%00000000005C8xGAOHXW00aO400008000002mk^A00000r~v>300aO4002M$0RR9100aO4AOr"
        "va0U!Vf00031000620ssI21pp8L0000000001000000000000000"
    ),
)

IQ3_S = Grid(
    levels=8,
    length=4,
    members=(
        "r&l8gr3wX-7bA%x5C9?sqe&tWqzV8D2qFba5CwoD0f-U=2?78C6aYmCq5wb$Knef?00aO66#zvD01*HH7pnz"
        "Q08j!1OA!JI0tEm;0i+QG2_OLkk_mzl0ssU7C=>t+L=gZ00to^I00IC2005ByPyhe`3Izfn0ssU7t5u2xDg}"
        "Tk1&JgQ1Ofm6k^l;U0*C+-B?1%*1OY$*f&d950ssIc5CQ~%0SEvAg#ZEo03ZSYAOb)E2mt^91gZoolmZ9>Di"
        "8_)0RRC+0R#aQ009610uhP<iXZ?82tot`00a>L0tFxh5I_J306+i$0ssI23IGKl000005d@J00s#O4gbD;92"
        "qFLg3Lydr0e}Pn5DEn%000001pp9$0RR93pa22@000C400;mO0003103iSY2m$~A1Q7%Pkpw^xDg*)q00004"
        "0Rjj?00;m8gaLp65CR|w5&!`NKmY&$00ck)015yA000001ONa46aWMO0000004e|q000310RVvj000mG00aO"
        "K1Rw+f0T2QJ0RR91001BW2mk~C2><{P00031AOHXW0RR91015yA00000kpKli0T2WL1OgBMC;$Ke5<vn100I"
        "C21ONae00;m8A_xHh00961000C41ONa41ONa6000000RR9100000"
    ),
)

IQ1 = Grid(
    levels=3,
    length=8,
    members=(
        "RV5UKpaMcs2t_fdh9HWf8VD*N6opU}f*?diB^3pr0)ilj7yt-@paUwPh`Xu^kg5v+A^-}ijDnyDKv4)qA&7u"
        "b6hcu5iZBS6pa_5}2t^?jg&;^mRR~1^EW)55iY5RmB&e#Q2;#2@2q-83paMcDswg0+fFKH+2)VkbAj+<ZqOP"
        "hseCz7EyMhk5BD%`c4w3>Q03sl$in<Dd0tf&qO5mb9A|NZG0D(Y(s){HGA^{YIP!)n82}L1Pg`fxmBd9tcgn"
        "}ScLQx2!APALE6ap#;xTu1FphyBB2!f($q5>$ZDhP!j2!b#OML+;WAryt6076j!MFA;-0E&Vt2%#_(1yB@%C"
        "<sL%6onuH0wAg?03Z^vimoWAx}mD5Z~%e|2m&Y~0)zm907!tK>aZ%R!XS&fBI??wi;HfklCUbOa*K*Y3@RW<"
        "gg_{YDhR3|$jqW5qOY2u=%@k!0stzghyWmfpo^lSD7v74f-(xazPP&n>!P45q6mr#DC(jBp)vvt`lRaK?<=S"
        "-jlO>C`uBgo=6$-}Y5OPtzb5(;>EVhZ5URcogsKR#s0)Iw|GFgUgMb8LENJqm3ZyFl0xAdy;;Iq=0)i?ErXb"
        "0JiI9RQ0HOelfD-_M2nYadimIx+0;ax-pvnS(YnLw2vgr_l5H70TC>7DA1ON(x0E&Vj2mzrWf~q;XA~J-a34"
        "j;?ilSlyffPhh07W6Jf>0DfQ3$FaD5{4F5-JEqAru9m2trW^MFAiJpg^J`0Ehqxq6lh=Zn&zdfB+y0g5t;`A"
        "qYfJ6hcu6iXat*P!xs=2&yV7fB*_YQ3ypLr~ptDLQx3fAc%qr7=kJYs-miju!{l;DykqTf`F<DC<rJ3sfYq1"
        "puP(zxCn~6OR}#2x}^B7svuG*Xttm*=70(UC<r2IVt^nD0;;Mjs_LStprQx}5Fnt6A^?I807W4bg`f&RQ3yp"
        "LsRjT_ssae501ypC6oM!SMIjUg00@GDtnwfL0062AC<?kD>Y@Swf=CG{=@bAFOGQxtMFFS+P!vK@2#6#Ih$s"
        "p`2mnO^6a}CHKv4)q0R"
    ),
)
