// Texts whose contrast with what lies behind them is below 4.5.
() => {
  const luminance = ([r, g, b]) => [r, g, b].map((part) => part / 255)
    .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
    .reduce((sum, part, at) => sum + part * [0.2126, 0.7152, 0.0722][at], 0);
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const colour = (css) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = css;
    canvas.fillRect(0, 0, 1, 1);
    return Array.from(canvas.getImageData(0, 0, 1, 1).data);
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const found = colour(getComputedStyle(at).backgroundColor);
      if (found[3] === 255) return found;
    }
    return [255, 255, 255, 255];
  };
  const low = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = Array.from(element.childNodes).some((node) => node.nodeType === 3 && /[a-z]/i.test(node.data));
    if (!own || !element.checkVisibility({ opacityProperty: true }) || element.closest(":disabled, svg, option")) continue;
    const style = getComputedStyle(element);
    if (style.opacity < 1 || element.closest("[aria-hidden]")) continue;
    const [text, ground] = [luminance(colour(style.color)), luminance(behind(element))];
    const ratio = (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05);
    if (ratio < 4.5) low.push(`${element.tagName}.${element.className}: ${ratio.toFixed(2)} ${element.textContent.slice(0, 30)}`);
  }
  return low;
}
